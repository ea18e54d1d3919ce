"""Token sources in memory: small corpora without shards."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data_pipeline.errors import DataError

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
    """Documents of these lengths, block by block, of random tokens after the first."""
    random = np.random.default_rng(seed)
    return TextSource(
        [
            [[OPENER, *random.integers(1, vocab_size, length - 1).tolist()] for length in block]
            for block in lengths
        ]
    )


class NumberedSource:
    """Tokens 0, 1, 2, ...: every token of the corpus has its own id, so lost ones are noticed.

    `blocks` lists the document lengths of every block. Records all reads; reading `broken_block`
    raises DataError.
    """

    dtype = np.dtype(np.uint32)

    def __init__(self, *blocks: list[int], broken_block: int | None = None) -> None:
        self.blocks, self.broken_block = blocks, broken_block
        self.block_tokens = np.array([sum(block) for block in blocks], np.int64)
        self.first = np.cumsum(self.block_tokens) - self.block_tokens
        self.reads: list[tuple[int, int, int]] = []

    def document_starts(self, block: int) -> np.ndarray:
        return np.cumsum([0, *self.blocks[block][:-1]])

    def read(self, block: int, start: int, stop: int) -> np.ndarray:
        assert 0 <= start < stop <= self.block_tokens[block]
        self.reads.append((block, start, stop))
        if block == self.broken_block:
            raise DataError(f"block {block} is broken")
        return np.arange(self.first[block] + start, self.first[block] + stop, dtype=self.dtype)


def numbered_sources(corpora: dict[str, list[list[int]]]) -> dict[str, TextSource]:
    """Sources by name from document lengths by block. No token id occurs twice."""
    sources, number = {}, 0
    for name, lengths in corpora.items():
        blocks: list[list[list[int]]] = []
        for block in lengths:
            blocks.append([])
            for length in block:
                blocks[-1].append(list(range(number, number + length)))
                number += length
        sources[name] = TextSource(blocks)
    return sources
