"""The cursor: reads ranges of tokens and their ages at any position of an epoch's order.

Tokens are read in chunks. With shuffled documents a chunk is a whole block; otherwise at most
`CHUNK_TOKENS` of one. A block of one document is not shuffled, so a document larger than RAM is
never read as a whole. A cursor keeps one chunk and returns ranges inside it without a copy. A jump
to any position reads one chunk.

`shard_reader.py` reads the tokens of a block, `order.py` defines which block follows, and
`lanes.py` defines the range that a lane needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.streams.order import ORDERINGS, EpochOrder

if TYPE_CHECKING:
    from data_pipeline.shards.shard_reader import TokenSource

CHUNK_TOKENS = 1 << 18
MAX_AGE = int(np.iinfo(np.int32).max)
"""Ages are capped here. No memory is that long, so the cap changes no attention mask."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenChunk:
    """Tokens [start, stop) of the order of `epoch`, and their document ages."""

    epoch: int
    start: int
    stop: int
    tokens: NDArray[Any]
    """[stop - start], in the source's dtype."""
    document_age: NDArray[np.int32]
    """[stop - start] tokens since the document's start, even if the document starts before the
    chunk."""
    following: NDArray[Any] | None = None
    """[stop - start] the token that follows each one in its document's text, if the chunk is of
    shuffled pieces; the last token of the epoch is followed by itself. None: the next one."""


def read_chunk(source: TokenSource, order: EpochOrder, position: int) -> TokenChunk:
    """The chunk that contains token `position` of the order; reads one block only, or with pieces
    the blocks of their group."""
    if order.ordering.piece_len is not None:
        return _read_group(source, order, position)
    block, block_start = order.locate(position)
    num_tokens = int(source.block_tokens[block])
    starts = source.document_starts(block)
    documents = order.document_order(block, len(starts))
    if documents is not None:
        first, stop = 0, num_tokens
        stored = source.read(block, 0, num_tokens)
        tokens, age = _permute(stored, starts, documents)
    else:
        # Chunks end on a fixed grid, so that all readers of a giant document request the same
        # ranges, from any start position.
        first = position - block_start
        stop = min((first // CHUNK_TOKENS + 1) * CHUNK_TOKENS, num_tokens)
        tokens, age = source.read(block, first, stop), _document_age(starts, first, stop)
    return TokenChunk(order.epoch, block_start + first, block_start + stop, tokens, age)


def _read_group(source: TokenSource, order: EpochOrder, position: int) -> TokenChunk:
    """The chunk of all pieces that are shuffled together with the one at `position`."""
    start, stop = group = order.group(position)
    text = replace(order, ordering=replace(order.ordering, piece_len=None))
    tokens, age, _ = LaneCursor().read(source, text, start, min(stop + 1, order.num_tokens))
    place = np.concatenate(
        [np.arange(first - start, end - start) for first, end in order.pieces_of_group(group)]
    )
    following = tokens[np.minimum(place + 1, len(tokens) - 1)]
    return TokenChunk(order.epoch, start, stop, tokens[place], age[place], following)


class LaneCursor:
    """Reads ranges of tokens for one lane. Consecutive ranges are fastest.

    Keeps one chunk of about `CHUNK_TOKENS` tokens. Not thread-safe.
    """

    def __init__(self) -> None:
        self._chunk = TokenChunk(-1, 0, 0, np.empty(0, np.uint8), np.empty(0, np.int32))

    def read(
        self, source: TokenSource, order: EpochOrder, start: int, stop: int
    ) -> tuple[NDArray[Any], NDArray[np.int32], NDArray[Any] | None]:
        """Tokens [start, stop) of the order in the source's dtype, their document ages, int32, and
        the tokens that follow them (`TokenChunk.following`).

        `source` must be the source of the order's epoch. The arrays may be views of the cursor's
        chunk: do not write to them.
        """
        tokens, age = [np.empty(0, source.dtype)], [np.empty(0, np.int32)]
        following = []
        while start < stop:
            chunk = self._chunk
            if chunk.epoch != order.epoch or not chunk.start <= start < chunk.stop:
                chunk = self._chunk = read_chunk(source, order, start)
            end = min(stop, chunk.stop)
            part = slice(start - chunk.start, end - chunk.start)
            tokens.append(chunk.tokens[part])
            age.append(chunk.document_age[part])
            if chunk.following is not None:
                following.append(chunk.following[part])
            start = end
        return _joined(tokens), _joined(age), _joined(following) if following else None


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """The parts as one array; a single part is not copied."""
    filled = [part for part in parts if len(part)]
    return filled[0] if len(filled) == 1 else np.concatenate(parts)


def read_range(
    source: TokenSource, start: int, stop: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Tokens [start, stop) of a split in corpus order, int64, and their document ages, int32.

    Ages count from the document's first token, also if that is before `start`. Reads only the
    blocks it needs. Raises ValueError for a range outside the split.
    """
    order = EpochOrder.of(source.block_tokens, seed=0, epoch=0, ordering=ORDERINGS["none"])
    if not 0 <= start <= stop <= order.num_tokens:
        raise ValueError(f"[{start}, {stop}) is not a range of {order.num_tokens:,} tokens")
    tokens, age, _ = LaneCursor().read(source, order, start, stop)
    return tokens.astype(np.int64), age.copy()


def _permute(
    stored: NDArray[Any], starts: NDArray[np.int64], documents: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """A block's tokens with its documents in the order `documents`, and their document ages."""
    lengths = np.diff(starts, append=len(stored))[documents]
    new_starts = np.cumsum(lengths) - lengths
    # int32 is enough: only blocks of one document, which are not permuted, can be longer.
    age = np.arange(len(stored), dtype=np.int32)
    age -= np.repeat(new_starts.astype(np.int32), lengths)
    stored_position = np.repeat(starts[documents], lengths)
    stored_position += age
    return stored.take(stored_position), age


def _document_age(starts: NDArray[np.int64], first: int, stop: int) -> NDArray[np.int32]:
    """Document ages of tokens [first, stop) of a block in stored order, int32 [stop - first]."""
    low = int(np.searchsorted(starts, first, side="right")) - 1
    high = int(np.searchsorted(starts, stop, side="left"))
    lengths = np.diff(np.append(np.clip(starts[low:high], first, stop), stop))
    age = np.arange(first, stop) - np.repeat(starts[low:high], lengths)
    return np.minimum(age, MAX_AGE).astype(np.int32)


def rising_ages(first: int, stop: int) -> NDArray[np.int32]:
    """first, first + 1, ..., stop - 1, capped at MAX_AGE, as int32."""
    return np.minimum(np.arange(first, stop), MAX_AGE).astype(np.int32)
