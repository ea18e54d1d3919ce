"""Token sources in memory: corpora of a few documents, without shards."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

OPENER = 0
"""The token that opens every document, as `end_of_document` does in shards."""


@dataclass(frozen=True)
class TextSource:
    """A TokenSource over `blocks`, which lists the token ids of every document of every block."""

    blocks: list[list[list[int]]]
    dtype = np.dtype(np.uint16)

    @cached_property
    def block_tokens(self) -> np.ndarray:
        return np.array([sum(map(len, block)) for block in self.blocks], np.int64)

    def document_starts(self, block: int) -> np.ndarray:
        return np.cumsum([0, *map(len, self.blocks[block][:-1])])

    def read(self, block: int, start: int, stop: int) -> np.ndarray:
        assert 0 <= start < stop <= self.block_tokens[block]
        return np.concatenate(self.blocks[block])[start:stop].astype(self.dtype)

    @property
    def documents(self) -> list[list[int]]:
        """All documents in corpus order."""
        return [document for block in self.blocks for document in block]


def random_corpus(lengths: list[list[int]], *, vocab_size: int, seed: int) -> TextSource:
    """Documents of these lengths, block by block, of random tokens behind the opener."""
    random = np.random.default_rng(seed)
    return TextSource(
        [
            [[OPENER, *random.integers(1, vocab_size, length - 1).tolist()] for length in block]
            for block in lengths
        ]
    )
