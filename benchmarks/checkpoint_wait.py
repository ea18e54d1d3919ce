"""What a save costs the training loop: the time it is blocked, and slower steps while writing.

    python benchmarks/checkpoint_wait.py

Trains a model of 126 million parameters on few tokens, on one rank, so that a checkpoint is written
during several steps, and saves often. Both figures compare steps of one run with each other,
because the load of the machine changes over minutes.
"""

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import Figure
from one_rank import one_rank
from training_figures import prepare_text

from txl_dist.training.loop import Trainer

CONFIG = Path(__file__).parents[1] / "configs" / "tiny.yaml"
MODEL = (
    "model.n_layer=8", "model.d_model=1024", "model.n_head=16", "model.d_head=64",
    "model.d_inner=5120", "model.mem_len=16", "data.tgt_len=16", "data.num_lanes=1",
)  # fmt: skip
MAX_SHARE, MAX_SECONDS, MAX_SLOWER = 0.02, 1.0, 0.05


def main() -> None:
    """Train, then print the figures with their limits; exit 1 if one is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--interval-steps", type=int, default=60)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare_text(work / "data")
        interval, num_steps = arguments.interval_steps, arguments.saves * arguments.interval_steps
        overrides = (
            f"data.path={work / 'data'}", f"directory={work / 'run'}", "evaluation.split=null",
            f"training.num_steps={num_steps}", f"training.checkpoint_interval_steps={interval}",
            "training.log_interval_steps=10", "optimizer.lr=1e-4", *MODEL,
        )  # fmt: skip
        with one_rank(CONFIG, overrides) as trainer:
            timing = Timing(trainer)
            trainer.run()
        size = sum(path.stat().st_size for path in work.rglob("*.safetensors")) / 1e6
    print(f"{size / len(timing.blocked_seconds):,.0f} MB per checkpoint and more")
    figures = timing.figures(arguments.interval_steps)
    for figure in figures:
        print(f"{figure.name:<44} {figure.value:>9.3f} {figure.unit:<3} limit {figure.limit:g}")
    sys.exit(0 if all(figure.holds for figure in figures) else 1)


class Timing:
    """Seconds of the steps and saves, and when checkpoints were written."""

    def __init__(self, trainer: Trainer) -> None:
        self.blocked_seconds: list[float] = []
        self.steps: list[tuple[float, float]] = []
        """Begin and end."""
        self.writes: list[tuple[float, float]] = []
        saver: Any = trainer.saver
        step, save, write = trainer._compute, saver.save, saver._write

        def timed(function: Any, times: list[tuple[float, float]]) -> Any:
            def call(*args: Any) -> Any:
                begin = time.perf_counter()
                result = function(*args)
                times.append((begin, time.perf_counter()))
                return result

            return call

        def timed_save(*args: Any) -> None:
            start = time.perf_counter()
            save(*args)
            self.blocked_seconds.append(time.perf_counter() - start)

        trainer._compute = timed(step, self.steps)  # type: ignore[method-assign]
        saver._write = timed(write, self.writes)
        saver.save = timed_save

    def figures(self, interval_steps: int) -> list[Figure]:
        """The first steps and the first save with its write allocate memory: they do not count."""
        blocked = statistics.median(self.blocked_seconds[1:])
        first_write_end = self.writes[0][1]
        rows = [
            (end - begin, sum(self._overlaps(begin, end)))
            for begin, end in self.steps
            if begin > first_write_end
        ]
        others = [seconds for seconds, writing in rows if not writing]
        if not others:
            sys.exit("a file was written in every step: give more --interval-steps")
        step = statistics.median(others)
        # Of a step that was written in for a part of it, only that part can be slower.
        longer = sum(seconds - step for seconds, writing in rows if writing)
        writing = sum(writing for _, writing in rows)
        print(
            f"step {step:.3f} s; {len(self.writes)} writes of "
            f"{statistics.median(end - begin for begin, end in self.writes):.2f} s; steps with "
            "a write: " + ", ".join(f"{seconds:.2f} ({part:.2f})" for seconds, part in rows if part)
        )
        interval = interval_steps * step
        return [
            Figure(
                "loop blocked by a save",
                blocked,
                "s",
                # One of the two limits has to hold.
                max(MAX_SECONDS, MAX_SHARE * interval),
                at_most=True,
                note=f"{blocked / interval:.1%} of the interval",
            ),
            Figure(
                "steps while writing, relative to others",
                writing / (writing - longer),
                "",
                1 + MAX_SLOWER,
                at_most=True,
            ),
        ]

    def _overlaps(self, begin: float, end: float) -> Iterator[float]:
        for first, last in self.writes:
            yield max(0.0, min(end, last) - max(begin, first))


if __name__ == "__main__":
    main()
