"""Order: in which order an epoch reads the blocks of a split, the documents inside each block, and
pieces of them.

The shuffle has two levels. Blocks (runs of whole documents that are decompressed together) are
sorted by a hash of (seed, epoch, block), the documents inside a block by a hash of (seed, epoch,
block, document). Any position of any epoch can therefore be located from integers alone, in
O(log blocks), and resuming needs no saved shuffle state. The trade-off: documents of one block stay
together in every epoch. A library's random generator is not used, because its output may change
with its version. `ORDERINGS` lists the orders; a new one is an entry there.

Any of them may be cut into pieces: the order above is then cut every `piece_len` tokens, and the
pieces are shuffled by a hash of (seed, epoch, group, piece) inside groups of about `GROUP_TOKENS`.
A lane keeps one group in memory:

    order            |piece 0|piece 1|piece 2|piece 3|piece 4|piece 5|piece 6|..
    groups           |--------- group 0 -----|--------- group 1 -----|
    order in pieces  |piece 2|piece 0|piece 1|piece 4|piece 5|piece 3|piece 6|..

With pieces as long as a segment this is training on windows at random places of the text, except
that each token is read once per epoch.

A change of the number of lanes inside an epoch leaves one unread range per lane: the remainder.
`lanes.py` joins the ranges and cuts the new lanes from the result, as it does from a whole epoch.

This module opens no files (`segments.py` reads) and does not know lanes (`lanes.py` cuts them).

Source: splitmix64, Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators",
doi:10.1145/2660193.2660195, with the constants of Vigna's public-domain splitmix64.c.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

GROUP_TOKENS = 1 << 18
"""Pieces are shuffled inside groups of at most so many tokens, or one piece: as many as a block of
the shards usually has. Changing it changes the order."""

Range = tuple[int, int]
"""Tokens [start, stop) of an epoch's order."""

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


def shuffled(*prefix: int, num_ids: int) -> NDArray[np.int64]:
    """The ids 0 .. num_ids - 1 in the order of their hashes, [num_ids]."""
    # No ties: hashes of one prefix are distinct, so any sort gives the same order.
    return np.argsort(hash_ids(*prefix, num_ids=num_ids)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Ordering:
    """How an epoch is ordered. A permutation is called with its prefix and `num_ids`, as
    `shuffled`; None keeps the order of the corpus."""

    blocks: Callable[..., NDArray[np.int64]] | None = None
    """Of the blocks of a split, with prefix (seed, epoch)."""
    documents: Callable[..., NDArray[np.int64]] | None = None
    """Of the documents of a block, with prefix (seed, epoch, block)."""
    piece_len: int | None = None
    """Tokens of a piece; None: no pieces."""

    @classmethod
    def named(cls, name: str, piece_len: int | None = None) -> "Ordering":
        """An entry of `ORDERINGS`, cut into pieces of `piece_len` tokens if it is given."""
        return replace(ORDERINGS[name], piece_len=piece_len)

    def order_of_blocks(self, *prefix: int, num_blocks: int) -> NDArray[np.int64]:
        """The numbers of the blocks in reading order."""
        return self.blocks(*prefix, num_ids=num_blocks) if self.blocks else np.arange(num_blocks)


ORDERINGS = {
    "none": Ordering(),
    "blocks": Ordering(blocks=shuffled, documents=shuffled),
    "whole_blocks": Ordering(blocks=shuffled),
}
"""The orders by name (`data.shuffle`)."""


@dataclass(frozen=True, slots=True, eq=False)
class EpochOrder:
    """The order of one epoch over one split: whole blocks, permuted. Build with `of`.

    Positions are those of the tokens in the blocks so ordered, "in the text". With pieces, the
    epoch reads other positions: `pieces` has them.
    """

    seed: int
    epoch: int
    ordering: Ordering
    blocks: NDArray[np.int64]
    """[num_blocks] block numbers in reading order."""
    starts: NDArray[np.int64]
    """[num_blocks + 1] tokens of the epoch before each block of `blocks`, then the total."""

    @classmethod
    def of(
        cls, block_tokens: NDArray[np.int64], *, seed: int, epoch: int, ordering: Ordering
    ) -> Self:
        """The order of `epoch` over blocks of `block_tokens` [num_blocks] tokens, in corpus order.

        Costs one sort of the blocks (about 2**18 tokens each), so an order is computed when its
        epoch begins and not stored.
        """
        blocks = ordering.order_of_blocks(seed, epoch, num_blocks=len(block_tokens))
        starts = np.concatenate([[0], np.cumsum(block_tokens[blocks])])
        return cls(seed=seed, epoch=epoch, ordering=ordering, blocks=blocks, starts=starts)

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    def locate(self, position: int) -> tuple[int, int]:
        """The block (its number in corpus order) that holds token `position` of the text, and the
        tokens before the block."""
        if not 0 <= position < self.num_tokens:
            raise ValueError(
                f"position={position} is outside the epoch's {self.num_tokens:,} tokens"
            )
        place = int(np.searchsorted(self.starts, position, side="right")) - 1
        return int(self.blocks[place]), int(self.starts[place])

    def document_order(self, block: int, num_documents: int) -> NDArray[np.int64] | None:
        """Document numbers of a block in reading order, [num_documents]; None for stored order."""
        if self.ordering.documents is None or num_documents == 1:
            return None
        # By the block's number, so the result does not depend on where the epoch has the block.
        return self.ordering.documents(self.seed, self.epoch, block, num_ids=num_documents)

    def pieces(self, position: int) -> tuple[Range, list[Range]]:
        """The group of pieces that has `position`, as its positions [start, stop), and these pieces
        in reading order, each as its positions in the text.

        The epoch's last piece, which may be shorter, keeps its place: the others have a next token.
        """
        piece_len = self.ordering.piece_len
        assert piece_len, "the order has no pieces"
        group_tokens = max(1, GROUP_TOKENS // piece_len) * piece_len
        start = position // group_tokens * group_tokens
        stop = min(start + group_tokens, self.num_tokens)
        firsts = np.arange(start, stop, piece_len)
        num_shuffled = len(firsts) - (stop == self.num_tokens)
        firsts[:num_shuffled] = firsts[shuffled(self.seed, self.epoch, start, num_ids=num_shuffled)]
        return (start, stop), [(first, min(first + piece_len, stop)) for first in firsts.tolist()]


# --- the unread part of an epoch ------------------------------------------------------------------


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
