"""The cursor: reads runs of tokens, with the age of each, anywhere in an epoch's order.

A chunk is what is read at once: a whole block if its documents are permuted, else up to
`CHUNK_TOKENS` of it, so that a document larger than memory is never read whole. A cursor keeps one
chunk and serves runs from it without a copy; a jump anywhere reads one chunk, no more.

Where a chunk comes from is the token source's business (`shard_reader.py`), which chunk comes next
the order's (`order.py`), and which run a lane wants the plan's (`lanes.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.streams.order import EpochOrder

if TYPE_CHECKING:
    from data_pipeline.shards.shard_reader import TokenSource

CHUNK_TOKENS = 1 << 18
LONG_DOCUMENT_TOKENS = 256
"""Documents of this mean length are moved faster one by one than token by token (measured)."""
MAX_AGE = int(np.iinfo(np.int32).max)
"""Ages stop here. No memory is that long, so no token can tell."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Tokens [start, stop) of the order of `epoch`, and tokens since each one's document began."""

    epoch: int
    start: int
    stop: int
    tokens: NDArray[Any]
    """[stop - start], in the source's dtype."""
    document_age: NDArray[np.int32]
    """[stop - start]. 0 at a document's first token, counted from its true start."""


def read_chunk(source: TokenSource, order: EpochOrder, position: int) -> Chunk:
    """The chunk that holds token `position` of the order; reads from one block only."""
    block, block_start = order.locate(position)
    num_tokens = int(source.block_tokens[block])
    starts = source.document_starts(block)
    documents = order.document_order(block, len(starts))
    if documents is not None:
        first, stop = 0, num_tokens
        stored = source.read(block, 0, num_tokens)
        tokens, age = _permute(stored, starts, documents)
    else:
        # Stops on a fixed grid, so that two readers of a giant document cut it alike.
        first = position - block_start
        stop = min((first // CHUNK_TOKENS + 1) * CHUNK_TOKENS, num_tokens)
        tokens, age = source.read(block, first, stop), _document_age(starts, first, stop)
    return Chunk(order.epoch, block_start + first, block_start + stop, tokens, age)


class LaneCursor:
    """Reads runs of tokens for one lane, fastest when each run starts where the last one stopped.

    Holds one chunk of about `CHUNK_TOKENS` tokens. Not for use by two threads at once.
    """

    def __init__(self) -> None:
        self._chunk = Chunk(-1, 0, 0, np.empty(0, np.uint8), np.empty(0, np.int32))

    def read(
        self, source: TokenSource, order: EpochOrder, start: int, stop: int
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Tokens [start, stop) of the order in the source's dtype, and their document ages, int32.

        `source` has the blocks of the order's epoch, the same whenever that epoch is read.

        Both may be views of what the cursor holds: read them, never write to them.
        """
        chunk = self._chunk
        if chunk.epoch == order.epoch and chunk.start <= start and stop <= chunk.stop:
            here = slice(start - chunk.start, stop - chunk.start)
            return chunk.tokens[here], chunk.document_age[here]

        tokens = np.empty(stop - start, source.dtype)
        age = np.empty(stop - start, np.int32)
        position = start
        while position < stop:
            chunk = self._chunk_at(source, order, position)
            here = slice(position - chunk.start, min(stop, chunk.stop) - chunk.start)
            there = slice(position - start, min(stop, chunk.stop) - start)
            tokens[there], age[there] = chunk.tokens[here], chunk.document_age[here]
            position = start + there.stop
        return tokens, age

    def _chunk_at(self, source: TokenSource, order: EpochOrder, position: int) -> Chunk:
        chunk = self._chunk
        if chunk.epoch != order.epoch or not chunk.start <= position < chunk.stop:
            chunk = self._chunk = read_chunk(source, order, position)
        return chunk


def read_range(
    source: TokenSource, start: int, stop: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Tokens [start, stop) of a split in corpus order, int64, and their document ages, int32.

    An age counts from the document's true start, also where that lies before `start`. Reads only
    the blocks it needs. Raises ValueError for a range outside the split.
    """
    order = EpochOrder.of(source.block_tokens, seed=0, epoch=0, shuffle="none")
    if not 0 <= start <= stop <= order.num_tokens:
        raise ValueError(f"[{start}, {stop}) is not a range of {order.num_tokens:,} tokens")
    tokens, age = LaneCursor().read(source, order, start, stop)
    return tokens.astype(np.int64), age.copy()


def _permute(
    stored: NDArray[Any], starts: NDArray[np.int64], documents: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """A block's tokens with its documents in the order `documents`, and their document ages."""
    stops = np.append(starts[1:], len(stored))
    lengths = (stops - starts)[documents]
    if len(stored) >= LONG_DOCUMENT_TOKENS * len(starts):
        # Copies of whole runs; but every run costs a call, whatever its length.
        runs = zip(starts[documents].tolist(), stops[documents].tolist(), strict=True)
        ramp = np.arange(lengths.max(), dtype=np.int32)
        age = np.concatenate([ramp[:length] for length in lengths.tolist()])
        return np.concatenate([stored[start:stop] for start, stop in runs]), age
    new_starts = np.cumsum(lengths) - lengths
    age = np.arange(len(stored), dtype=np.int32)  # only one-document blocks outgrow int32
    age -= np.repeat(new_starts.astype(np.int32), lengths)
    here = np.repeat(starts[documents], lengths)
    here += age
    return stored.take(here), age


def _document_age(starts: NDArray[np.int64], first: int, stop: int) -> NDArray[np.int32]:
    """Document ages of tokens [first, stop) of a block in stored order, int32 [stop - first]."""
    low = int(np.searchsorted(starts, first, side="right")) - 1
    high = int(np.searchsorted(starts, stop, side="left"))
    lengths = np.diff(np.append(np.clip(starts[low:high], first, stop), stop))
    if high - low == 1:  # inside one document, as most of a giant one is
        return rising_ages(first - int(starts[low]), stop - int(starts[low]))
    age = np.arange(first, stop) - np.repeat(starts[low:high], lengths)
    return np.minimum(age, MAX_AGE).astype(np.int32)


def rising_ages(first: int, stop: int) -> NDArray[np.int32]:
    """first, first + 1, ... stop - 1, none above MAX_AGE, as int32."""
    if stop <= MAX_AGE:
        return np.arange(first, stop, dtype=np.int32)
    return np.minimum(np.arange(first, stop), MAX_AGE).astype(np.int32)
