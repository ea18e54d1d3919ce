"""What engine, data, logging and tracking add to a bare training step, at the quickstart's size.

    python benchmarks/step_overhead.py [--steps 60] [--threads 1] [k.e.y=value ...]

One process, one rank. A bare step is forward, backward, clipping and AdamW in plain torch, by a
second model, on the same segments. Both kinds of step alternate in one run, so
that other load of the machine affects both alike. The second table shows the parts of both.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from one_rank import one_rank, prepare_email

from data_pipeline.streams.segments import Batch
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.training.loop import Trainer

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
LIMIT_PERCENT = 5.0
WARM_UP_STEPS = 5
"""Steps of each kind that are not counted."""

Parts = dict[str, list[float]]


class BareStep:
    """One step in plain torch, on a given batch."""

    def __init__(self, trainer: Trainer, parts: Parts) -> None:
        optimizer, model = trainer.config.optimizer, trainer.step.engine.model
        self.model = TransformerXL(model.config, seed=trainer.config.seed)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=optimizer.lr, weight_decay=0.0, fused=True
        )
        self.memory: Any = self.model.empty_memory(trainer.config.data.num_lanes)
        self.clipping, self.parts = optimizer.gradient_clipping, parts

    def __call__(self, batch: Batch) -> None:
        columns = (batch.input, batch.target, batch.age)
        inputs = [torch.from_numpy(column) for column in columns]
        with timed(self.parts, "forward"):
            nats_BT, self.memory = self.model(*inputs, self.memory)
        with timed(self.parts, "backward"):
            nats_BT.mean().backward()
        with timed(self.parts, "clip and update"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clipping, foreach=False)
            self.optimizer.step()
            self.optimizer.zero_grad()


class timed:  # noqa: N801 - reads like a function
    """Adds the seconds of a block to `parts[name]`."""

    def __init__(self, parts: Parts, name: str) -> None:
        self.seconds = parts.setdefault(name, [])

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds.append(time.perf_counter() - self.start)


class Alternation:
    """Reads the batches of a run. A read ends a step of the run; then a bare step follows."""

    def __init__(self, read: Callable[[], Batch], bare: BareStep, parts: Parts) -> None:
        self.original, self.bare, self.parts = read, bare, parts
        self.batch: Batch | None = None
        self.ours: list[float] = []
        self.bare_seconds: list[float] = []

    def read(self) -> Batch:
        if self.batch is not None:
            self.ours.append(time.perf_counter() - self.start)
            start = time.perf_counter()
            self.bare(self.batch)
            self.bare_seconds.append(time.perf_counter() - start)
        self.start = time.perf_counter()
        with timed(self.parts, "data"):
            self.batch = self.original()
        return self.batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="settings of the run: k.e.y=value")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options.steps, options.overrides)


def measure(folder: Path, num_steps: int, overrides: list[str]) -> None:
    """Train in `folder`, and print the two tables."""
    settings = [
        f"data.path={prepare_email(folder / 'data')}",
        f"directory={folder / 'run'}",
        f"training.num_steps={num_steps + WARM_UP_STEPS + 1}",
        "optimizer.warmup_steps=1",
        "training.checkpoint_interval_steps=1000000",
        "evaluation.split=null",
    ]
    ours: Parts = {}
    bare: Parts = {}
    with one_rank(CONFIG, [*settings, *overrides]) as trainer:
        engine = trainer.step.engine
        for owner, name, part in (
            (engine, "forward", "forward"),
            (engine, "backward", "backward"),
            (engine, "step", "clip and update"),
            (trainer, "_write_line", "report, every tenth step"),
        ):
            setattr(owner, name, with_timer(getattr(owner, name), ours, part))
        alternation = Alternation(trainer.batches.read, BareStep(trainer, bare), ours)
        trainer.batches.read = alternation.read  # type: ignore[method-assign]
        trainer.run()
    print_tables(alternation, ours, bare)


def with_timer(function: Callable[..., Any], parts: Parts, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with timed(parts, name):
            return function(*args, **kwargs)

    return call


def print_tables(alternation: Alternation, ours: Parts, bare: Parts) -> None:
    own = [seconds * 1e3 for seconds in alternation.ours[WARM_UP_STEPS:]]
    plain = [seconds * 1e3 for seconds in alternation.bare_seconds[WARM_UP_STEPS:]]
    # Medians of pairs: a disturbance of seconds affects a step and the bare step next to it.
    share = statistics.median(a / b - 1 for a, b in zip(own, plain, strict=True))
    print(f"{len(own)} steps of each kind, alternating")
    print(f"step of a run         {statistics.median(own):8.2f} ms (median)")
    print(f"bare step             {statistics.median(plain):8.2f} ms (median)")
    print(
        f"overhead              {share * 100:8.2f} %   limit {LIMIT_PERCENT} %   "
        f"{'holds' if share * 100 <= LIMIT_PERCENT else 'DOES NOT HOLD'}"
    )
    print(f"\n{'median ms of a step':28}{'run':>8}{'bare':>8}")
    rest = statistics.median(own)
    for name in ours:
        median = statistics.median(ours[name][WARM_UP_STEPS:] or ours[name]) * 1e3
        bare_median = statistics.median(bare[name][WARM_UP_STEPS:]) * 1e3 if name in bare else 0.0
        print(f"{name:28}{median:8.2f}{bare_median:8.2f}")
        rest -= median if not name.startswith("report") else 0.0
    print(f"{'loss sums, agreement, state':28}{rest:8.2f}")


if __name__ == "__main__":
    main()
