"""`txl bench`: what a user measures on a machine. Each figure has a limit, or a peak to compare.

Figures are measured in alternating rounds, and peak RAM in a new process.

Clock frequency and other load change over minutes, so single times are not comparable. Ratios of
candidates that alternate are, and medians ignore a few disturbed rounds.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """One result of a benchmark, with its limit."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    at_most: bool = False
    """Whether the limit is an upper bound."""
    note: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the value is within the limit; None without one."""
        if self.limit is None:
            return None
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def print_figures(figures: Iterable[Figure], *, as_json: bool = False) -> None:
    """Print each figure when it is measured, or all figures as one JSON object."""
    if as_json:
        rows = [{**asdict(figure), "holds": figure.holds} for figure in figures]
        print(json.dumps({"figures": rows}))
        return
    print(f"{'figure':<62} {'measured':>9} {'limit':>11}")
    for figure in figures:
        sign = "<=" if figure.at_most else ">="
        limit = "" if figure.limit is None else f"{sign} {figure.limit:g}"
        verdict = {True: "holds", False: "MISSED", None: ""}[figure.holds]
        print(
            f"{figure.name:<62} {figure.value:>9.3g} {limit:>11}  {figure.unit}  {verdict}"
            f"{'  (' + figure.note + ')' if figure.note else ''}",
            flush=True,
        )


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one candidate per round."""

    seconds: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


PEAK_STEPS = 3
WARM_UP_ROUNDS = 5
"""Rounds that are not counted, because the process still allocates RAM in them."""


def time_rounds(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm_up_rounds: int = WARM_UP_ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:
    """Run every candidate once per round, for `rounds` rounds after the warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(warm_up_rounds + rounds):
        for name, run in candidates.items():
            began = clock()
            run()
            if number >= warm_up_rounds:
                seconds[name].append(clock() - began)
    return {name: Times(values) for name, values in seconds.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's operations of the context on one thread, so that times include no waiting."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def peak_mib(build: Callable[..., Callable[[], object]], *arguments: object) -> float | None:
    """Peak MiB of running the function that `build(*arguments)` returns, above those after `build`.

    Includes gradients and optimizer state, not the model. None on systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        return None
    # VmHWM is a maximum over the life of a process, so every measurement needs a new one.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measure, build, *arguments).result()


def _measure(build: Callable[..., Callable[[], object]], *arguments: object) -> float:
    run = build(*arguments)
    before = kib("VmRSS")
    for _ in range(PEAK_STEPS):
        run()
    return (kib("VmHWM") - before) / 1024


def kib(name: str) -> int:
    """A field of /proc/self/status. (`ru_maxrss` is inherited from a larger parent process.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))
