"""Timing by turns: all candidates in one process, one after the other, round by round.

Machines are shared and their clocks move, so a time means little alone. Ratios of things that took
turns in the same minutes do mean something, and medians forgive the rounds that were disturbed.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a benchmark: what was reached and what was to be."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    at_most: bool = False
    """Whether the limit is an upper one."""
    note: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the limit is kept; None without one."""
        if self.limit is None:
            return None
        return self.value <= self.limit if self.at_most else self.value >= self.limit


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one candidate, one a round."""

    seconds: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)


WARM_UP_ROUNDS = 5
"""Not counted: until then the process still asks the system for memory."""


def take_turns(candidates: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, Times]:
    """Run every candidate once a round, `rounds` times after the rounds that warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(WARM_UP_ROUNDS + rounds):
        for name, run in candidates.items():
            began = time.perf_counter()
            run()
            if number >= WARM_UP_ROUNDS:
                seconds[name].append(time.perf_counter() - began)
    return {name: Times(values) for name, values in seconds.items()}
