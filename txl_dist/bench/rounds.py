"""Interleaved timing: every round runs each candidate once, in one process.

Clock frequency and other load change over minutes, so single times are not comparable. Ratios of
candidates that alternate are, and medians ignore a few disturbed rounds.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one candidate per round."""

    seconds: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


WARM_UP_ROUNDS = 5
"""Rounds that are not counted, because the process still allocates memory in them."""


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
