"""Data wait, tracking with a server that never answers, and weak scaling.

    python benchmarks/training_figures.py [--rounds 3]

Runs of the quickstart's model with the quickstart's lanes per rank, started as `txl train` starts
them, each rank with one thread. Candidates alternate, because the speed of a machine changes over
minutes; each figure is the median over the rounds of a ratio of two neighbouring runs.
"""

import json
import os
import socket
import statistics
import sysconfig
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from figures import Figure, run_script

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import PrepareSettings
from txl_dist.config.data_config import DataConfig
from txl_dist.config.run_config import RunConfig
from txl_dist.config.training_config import EvaluationConfig, TrackingConfig, TrainingConfig
from txl_dist.launch.processes import ProcessLauncher
from txl_dist.model.config import ModelConfig
from txl_dist.training.spec import TrainSpec

LANES_PER_RANK = 8
LOG_INTERVAL_STEPS = 5
WARM_UP_LINES = 2
"""Lines of metrics.jsonl that are not counted."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians over the lines of one run."""

    tokens_per_second: float
    data_wait: float
    """Share of a step."""


def bench_train(*, rounds: int, num_steps: int = 100) -> Iterator[Figure]:
    """Yield the figures. All files go to a temporary directory."""
    # A sender may still write for seconds after its run.
    with (
        tempfile.TemporaryDirectory(prefix="txl-bench-", ignore_cleanup_errors=True) as folder,
        silent_server() as uri,
        _one_thread_per_rank(),
    ):
        work = Path(folder)
        prepare_text(work / "data")

        def train(name: str) -> Speed:
            num_ranks = 2 if name.startswith("two") else 1
            config = bench_config(
                work / "data",
                work / name,
                num_ranks=num_ranks,
                num_steps=num_steps,
                tracking=TrackingConfig(enabled=name.startswith("hanging"), uri=uri),
            )
            return _train(config, num_ranks=num_ranks)

        speeds: dict[str, list[Speed]] = {"one": [], "hanging": [], "two": []}
        pairs: list[tuple[Speed, Speed]] = []
        with ThreadPoolExecutor(max_workers=2) as threads:
            for number in range(rounds):
                for name, measured in speeds.items():
                    measured.append(train(f"{name}-{number}"))
                first, second = threads.map(train, (f"pair-{number}-a", f"pair-{number}-b"))
                pairs.append((first, second))
        yield from figures_of(speeds, pairs)


def figures_of(
    speeds: dict[str, list[Speed]], pairs: Sequence[tuple[Speed, Speed]]
) -> Iterator[Figure]:
    """The figures of the runs `one` (rank, no tracking), `hanging` (server) and `two` (ranks).

    `pairs`: runs of one rank, two at the same time.
    """
    one, hanging, two = (speeds[name] for name in ("one", "hanging", "two"))
    wait = statistics.median(speed.data_wait for speed in one) * 100
    yield Figure("data wait", wait, "% of a step", 1.0, at_most=True)
    slower = [
        (off.tokens_per_second / on.tokens_per_second - 1) * 100
        for off, on in zip(one, hanging, strict=True)
    ]
    yield Figure(
        "steps slower by tracking, server that never answers",
        statistics.median(slower), "%", 1.0, at_most=True, note=_spread(slower),
    )  # fmt: skip
    scaling = [
        double.tokens_per_second / (2 * single.tokens_per_second)
        for single, double in zip(one, two, strict=True)
    ]
    independent = [
        (first.tokens_per_second + second.tokens_per_second) / (2 * single.tokens_per_second)
        for single, (first, second) in zip(one, pairs, strict=True)
    ]
    rate = statistics.median(speed.tokens_per_second for speed in one)
    yield Figure(
        "weak scaling, 1 to 2 ranks with one thread each",
        statistics.median(scaling), "", 0.9,
        note=f"{_spread(scaling)}; one rank: {rate:,.0f} tokens per second; "
        f"two runs that do not communicate: {statistics.median(independent):.2f}",
    )  # fmt: skip


def _spread(values: list[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g} in {len(values)} rounds"


def prepare_text(out: Path) -> None:
    """Bytes of the top-level modules of the standard library, a few MB."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    prepare_dataset(modules, out, PrepareSettings(tokenizer="byte"))


def bench_config(
    data: Path, run: Path, *, num_ranks: int, num_steps: int, tracking: TrackingConfig
) -> RunConfig:
    """The model of configs/quickstart.yaml, with the same number of lanes on every rank."""
    return RunConfig(
        directory=str(run),
        data=DataConfig(path=str(data), num_lanes=LANES_PER_RANK * num_ranks, tgt_len=128),
        model=ModelConfig(n_layer=4, d_model=128, n_head=4, d_head=32, d_inner=512, mem_len=128),
        training=TrainingConfig(num_steps=num_steps, log_interval_steps=LOG_INTERVAL_STEPS),
        evaluation=EvaluationConfig(split=None),
        tracking=tracking,
    )


def _train(config: RunConfig, *, num_ranks: int) -> Speed:
    spec = TrainSpec(config=config, resume="never")
    ProcessLauncher().train(spec, num_ranks=num_ranks, on_line=lambda _: None)
    text = (config.run_path / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    counted = [line for line in lines if "tokens_per_second" in line][WARM_UP_LINES:]
    return Speed(
        statistics.median(line["tokens_per_second"] for line in counted),
        statistics.median(line["data_wait"] for line in counted),
    )


@contextmanager
def silent_server() -> Iterator[str]:
    """The URI of a server on this machine that accepts connections and never answers."""
    accepted = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            try:
                while True:
                    accepted.append(server.accept()[0])
            except OSError:  # closed
                return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in accepted:
                connection.close()


@contextmanager
def _one_thread_per_rank() -> Iterator[None]:
    """ProcessLauncher passes this process's environment to the ranks."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


if __name__ == "__main__":
    run_script(__doc__, bench_train, rounds=3)
