"""Order: in which order an epoch reads the blocks of a split, and the documents inside each block.

The shuffle has two levels. Blocks (runs of whole documents that are decompressed together) are
sorted by a hash of (seed, epoch, block), the documents inside a block by a hash of (seed, epoch,
block, document). Any position of any epoch can therefore be located from integers alone, in
O(log blocks), and resuming needs no saved shuffle state. The trade-off: documents of one block stay
together in every epoch. A library's random generator is not used, because its output may change
with its version. With `whole_blocks`, the documents inside a block keep their order.

A change of the number of lanes inside an epoch leaves one unread range per lane: the remainder.
`lanes.py` joins the ranges and cuts the new lanes from the result, as it does from a whole epoch.

This module opens no files (`cursor.py` reads) and does not know lanes (`lanes.py` cuts them).

Source: splitmix64, Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators",
doi:10.1145/2660193.2660195, with the constants of Vigna's public-domain splitmix64.c.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Shuffle = Literal["blocks", "whole_blocks", "none"]

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The next output of splitmix64 for each state; `state` has at least one dimension.

    The generator would then add `GOLDEN_GAMMA` to its state. A bijection on 64 bits.
    """
    # At least one dimension: numpy warns about overflow of scalars, not of arrays.
    z = state + GOLDEN_GAMMA
    z = (z ^ (z >> np.uint64(30))) * MULTIPLIER_1
    z = (z ^ (z >> np.uint64(27))) * MULTIPLIER_2
    return z ^ (z >> np.uint64(31))


def hash_ids(*prefix: int, num_ids: int) -> NDArray[np.uint64]:
    """The 64-bit hashes of (*prefix, id) for id in 0 .. num_ids - 1, as uint64 [num_ids].

    Prefix words must be below 2**64. splitmix64 is a bijection, so ids with the same prefix never
    have the same hash.
    """
    state = np.zeros(1, np.uint64)
    for word in prefix:
        state = splitmix64(state ^ np.uint64(word))
    return splitmix64(state ^ np.arange(num_ids, dtype=np.uint64))


class BlockPlace(NamedTuple):
    """A block and its position in the order of an epoch."""

    block: int
    """The block's number in corpus order."""
    start: int
    """Tokens of the epoch before the block."""


@dataclass(frozen=True, slots=True, eq=False)
class EpochOrder:
    """The order of one epoch over one split: whole blocks, permuted. Build with `of`."""

    seed: int
    epoch: int
    shuffle: Shuffle
    blocks: NDArray[np.int64]
    """[num_blocks] block numbers in reading order."""
    starts: NDArray[np.int64]
    """[num_blocks + 1] tokens of the epoch before each block of `blocks`, then the total."""

    @classmethod
    def of(
        cls, block_tokens: NDArray[np.int64], *, seed: int, epoch: int, shuffle: Shuffle
    ) -> Self:
        """The order of `epoch` over blocks of `block_tokens` [num_blocks] tokens, in corpus order.

        Costs one sort of the blocks (about 2**18 tokens each), so an order is computed when its
        epoch begins and not stored.
        """
        num_blocks = len(block_tokens)
        if shuffle != "none":
            # No ties: hashes of one prefix are distinct, so any sort gives the same order.
            blocks = np.argsort(hash_ids(seed, epoch, num_ids=num_blocks)).astype(np.int64)
        else:
            blocks = np.arange(num_blocks, dtype=np.int64)
        starts = np.zeros(num_blocks + 1, np.int64)
        np.cumsum(block_tokens[blocks], out=starts[1:])
        return cls(seed=seed, epoch=epoch, shuffle=shuffle, blocks=blocks, starts=starts)

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    def locate(self, position: int) -> BlockPlace:
        """The block that holds token `position` of the epoch, 0 <= position < num_tokens."""
        if not 0 <= position < self.num_tokens:
            raise ValueError(
                f"position={position} is outside the epoch's {self.num_tokens:,} tokens"
            )
        place = int(np.searchsorted(self.starts, position, side="right")) - 1
        return BlockPlace(block=int(self.blocks[place]), start=int(self.starts[place]))

    def document_order(self, block: int, num_documents: int) -> NDArray[np.int64] | None:
        """Document numbers of a block in reading order, [num_documents]; None for stored order."""
        if self.shuffle != "blocks" or num_documents == 1:
            return None
        # Hashes the block's number, so the result does not depend on where the epoch has the block.
        hashes = hash_ids(self.seed, self.epoch, block, num_ids=num_documents)
        return np.argsort(hashes).astype(np.int64)


# --- the unread part of an epoch ------------------------------------------------------------------


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
