"""Order: in which order an epoch reads the blocks of a split, and the documents inside each block.

A shuffle in two levels. Blocks (runs of whole documents that decompress at once) are sorted by a
hash of (seed, epoch, block), the documents inside a block by a hash of (seed, epoch, block,
document). So any place of any epoch is found from integers alone, in O(log blocks), and the order
depends on no library's random generator, whose stream may change with its version.

This module opens no files (`cursor.py` reads) and knows nothing of lanes (`lanes.py` cuts).

Source: splitmix64, Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators",
doi:10.1145/2660193.2660195, with the constants of Vigna's public-domain splitmix64.c.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Shuffle = Literal["blocks", "none"]

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The number splitmix64 returns next from each state; `state` has at least one dimension.

    The generator's own state then moves on by `GOLDEN_GAMMA`. A bijection on 64 bits.
    """
    z = state + GOLDEN_GAMMA
    z = (z ^ (z >> np.uint64(30))) * MULTIPLIER_1
    z = (z ^ (z >> np.uint64(27))) * MULTIPLIER_2
    return z ^ (z >> np.uint64(31))


def hash_ids(*prefix: int, num_ids: int) -> NDArray[np.uint64]:
    """The 64-bit hashes of (*prefix, id) for id in 0 .. num_ids - 1, as uint64 [num_ids].

    Words are below 2**64. For one prefix no two ids share a hash, for splitmix64 is a bijection.
    """
    state = np.zeros(1, np.uint64)
    for word in prefix:
        state = splitmix64(state ^ np.uint64(word))
    return splitmix64(state ^ np.arange(num_ids, dtype=np.uint64))


class BlockPlace(NamedTuple):
    """A block and where the epoch's order has it."""

    block: int
    """Its id, which counts blocks in corpus order."""
    start: int
    """Tokens of the epoch before it."""


@dataclass(frozen=True, slots=True, eq=False)
class EpochOrder:
    """The order of one epoch over one split: whole blocks, permuted. Build with `of`."""

    seed: int
    epoch: int
    shuffle: Shuffle
    blocks: NDArray[np.int64]
    """[num_blocks] block ids in reading order."""
    starts: NDArray[np.int64]
    """[num_blocks + 1] tokens of the epoch before each block of `blocks`, then the total."""

    @classmethod
    def of(
        cls, block_tokens: NDArray[np.int64], *, seed: int, epoch: int, shuffle: Shuffle
    ) -> Self:
        """The order of `epoch` over blocks of `block_tokens` [num_blocks] tokens, in corpus order.

        Costs one sort of the blocks (a block is about 2**18 tokens), so an epoch's order is made
        when it is needed and thrown away after it.
        """
        num_blocks = len(block_tokens)
        if shuffle == "blocks":
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
        """The documents of a block in reading order, [num_documents]; None: as they are stored."""
        if self.shuffle == "none" or num_documents == 1:
            return None
        hashes = hash_ids(self.seed, self.epoch, block, num_ids=num_documents)
        return np.argsort(hashes).astype(np.int64)
