"""Remainder: the tokens of one epoch that a run has not read yet, as ranges of the epoch's order.

A change of the number of lanes inside an epoch leaves one unread range per lane. `lanes.py` joins
them and cuts the new lanes from the result, as it does from a whole epoch. Pure integers.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

Range = tuple[int, int]
"""Tokens [start, stop) of an epoch's order."""


@dataclass(frozen=True)
class Remainder:
    """Ranges in ascending order with gaps between them. Joined position p counts their tokens."""

    ranges: tuple[Range, ...]
    context_tokens: int = 0
    """Tokens before each lane's first one that are replayed, unscored, to fill its memory. Fewer if
    the epoch starts later."""

    def __post_init__(self) -> None:
        bounds = [-1, *(bound for part in self.ranges for bound in part)]
        if not self.ranges or any(low >= high for low, high in pairwise(bounds)):
            raise ValueError(f"ranges={self.ranges} must be ascending, with gaps between them")

    @cached_property
    def starts(self) -> list[int]:
        """Joined position of each range's first token, then the number of tokens."""
        return [0, *accumulate(stop - start for start, stop in self.ranges)]

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]

    def ranges_of(self, start: int, stop: int) -> list[Range]:
        """Joined positions [start, stop) as ranges of the order; usually one, none if empty."""
        ranges = []
        number = bisect_right(self.starts, start) - 1
        while start < stop:
            end = min(stop, self.starts[number + 1])
            shift = self.ranges[number][0] - self.starts[number]
            ranges.append((start + shift, end + shift))
            start, number = end, number + 1
        return ranges


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The union of ranges: ascending, with gaps between them; empty ones are dropped."""
    union: list[Range] = []
    for start, stop in sorted(part for part in ranges if part[0] < part[1]):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(stop, union[-1][1]))
        else:
            union.append((start, stop))
    return tuple(union)


def num_tokens(ranges: Iterable[Range]) -> int:
    """Sum of the lengths of ranges; overlaps count twice."""
    return sum(stop - start for start, stop in ranges)
