"""What a save costs the training loop: the time it is blocked, and slower steps while writing.

    python benchmarks/checkpoint_wait.py

Trains a model of 20 million parameters on one rank, and saves often. Both figures compare steps of
one run with each other, because the load of the machine changes over minutes.
"""

import argparse
import logging
import os
import socket
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.prepare_settings import PrepareSettings
from txl_dist.bench.rounds import Figure
from txl_dist.config.config_file import load_run_config
from txl_dist.runtime.world import World
from txl_dist.training.build import build_trainer
from txl_dist.training.job import TrainJob
from txl_dist.training.loop import Trainer
from txl_dist.training.run_directory import RunDirectory

CONFIG = Path(__file__).parents[1] / "configs" / "tiny.yaml"
MODEL = (
    "model.n_layer=6", "model.d_model=512", "model.n_head=8", "model.d_head=64",
    "model.d_inner=2048", "model.mem_len=64", "data.tgt_len=64", "data.num_lanes=2",
)  # fmt: skip
MAX_SHARE, MAX_SECONDS, MAX_SLOWER = 0.02, 1.0, 0.05


def main() -> None:
    """Train, then print the figures with their limits; exit 1 if one is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--interval-steps", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        trainer = build(Path(folder), stack, arguments)
        timing = Timing(trainer)
        trainer.run()
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors")) / 1e6
    print(f"{size / len(timing.blocked_seconds):,.0f} MB per checkpoint and more")
    figures = timing.figures(arguments.interval_steps)
    for figure in figures:
        print(f"{figure.name:<44} {figure.value:>9.3f} {figure.unit:<3} limit {figure.limit:g}")
    sys.exit(0 if all(figure.holds for figure in figures) else 1)


def build(folder: Path, stack: ExitStack, arguments: argparse.Namespace) -> Trainer:
    """A run of one rank in this process."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    text = folder / "text.txt"
    text.write_bytes(
        b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    )
    prepare_dataset([text], folder / "data", PrepareSettings())
    interval, num_steps = arguments.interval_steps, arguments.saves * arguments.interval_steps
    overrides = (
        f"data.path={folder / 'data'}", f"directory={folder / 'run'}", "evaluation.split=null",
        f"training.num_steps={num_steps}", f"training.checkpoint_interval_steps={interval}",
        "training.log_interval_steps=10", "optimizer.lr=1e-4", *MODEL,
    )  # fmt: skip
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    job = TrainJob(config=load_run_config(CONFIG, list(overrides)))
    directory = RunDirectory(job.run_path)
    directory.create()
    return build_trainer(job, World(0, 1), directory, stack)


class Timing:
    """Seconds of each step, of each save, and whether a checkpoint was being written."""

    def __init__(self, trainer: Trainer) -> None:
        self.blocked_seconds: list[float] = []
        self.writing: list[float] = []
        self.not_writing: list[float] = []
        saver: Any = trainer.saver
        step, save = trainer._step, saver.save

        def timed_step(*args: Any) -> Any:
            was_idle, start = saver._queue.wait(0), time.perf_counter()
            result = step(*args)
            seconds, is_idle = time.perf_counter() - start, saver._queue.wait(0)
            if not is_idle:
                self.writing.append(seconds)
            elif was_idle:
                self.not_writing.append(seconds)
            return result

        def timed_save(*args: Any) -> None:
            start = time.perf_counter()
            save(*args)
            self.blocked_seconds.append(time.perf_counter() - start)

        trainer._step, saver.save = timed_step, timed_save  # type: ignore[method-assign]

    def figures(self, interval_steps: int) -> list[Figure]:
        """The first steps and the first save allocate memory, so they do not count."""
        blocked = statistics.median(self.blocked_seconds[1:])
        step = statistics.median(self.not_writing[3:])
        writing = statistics.median(self.writing) if self.writing else step
        print(
            f"step {step:.3f} s, while writing {writing:.3f} s "
            f"({len(self.writing)} of {len(self.writing) + len(self.not_writing)} steps)"
        )
        share = blocked / (interval_steps * step)
        # One of the two limits has to hold.
        limit = max(MAX_SHARE, MAX_SECONDS / (interval_steps * step))
        return [
            Figure("loop blocked by a save", blocked, "s", MAX_SECONDS, at_most=True),
            Figure("loop blocked, share of the interval", share, "", limit, at_most=True),
            Figure(
                "steps while writing, relative to others",
                writing / step,
                "",
                1 + MAX_SLOWER,
                at_most=True,
            ),
        ]


if __name__ == "__main__":
    main()
