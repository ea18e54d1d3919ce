"""Pieces: reads runs of tokens, with the age of each, anywhere in an epoch's order.

A piece is what is read at once: a whole block if its documents are permuted, else up to
`PIECE_TOKENS` of it, so that a document larger than memory is never read whole. A cursor keeps one
piece and serves runs from it without a copy; a jump anywhere reads one piece, no more.

Where a piece comes from is the token source's business (`shard_reader.py`), which piece comes next
the order's (`order.py`), and which run a lane wants the plan's (`lanes.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.order import EpochOrder

if TYPE_CHECKING:
    from data_pipeline.shard_reader import TokenSource

PIECE_TOKENS = 1 << 18
MAX_AGE = int(np.iinfo(np.int32).max)
"""Ages stop here. No memory is that long, so no token can tell."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Tokens [start, stop) of the order of `epoch`, and tokens since each one's document began."""

    epoch: int
    start: int
    stop: int
    tokens: NDArray[Any]
    """[stop - start], in the source's dtype."""
    document_age: NDArray[np.int32]
    """[stop - start]. 0 at a document's first token, counted from its true start."""


def read_piece(source: TokenSource, order: EpochOrder, position: int) -> Piece:
    """The piece that holds token `position` of the order; reads from one block only."""
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
        stop = min((first // PIECE_TOKENS + 1) * PIECE_TOKENS, num_tokens)
        tokens, age = source.read(block, first, stop), _document_age(starts, first, stop)
    return Piece(order.epoch, block_start + first, block_start + stop, tokens, age)


class LaneCursor:
    """Reads runs of tokens for one lane, fastest when each run starts where the last one stopped.

    Holds one piece of about `PIECE_TOKENS` tokens. Not for use by two threads at once.
    """

    def __init__(self, source: TokenSource) -> None:
        self._source = source
        self._piece = Piece(-1, 0, 0, np.empty(0, source.dtype), np.empty(0, np.int32))

    def read(
        self, order: EpochOrder, start: int, stop: int
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Tokens [start, stop) of the order in the source's dtype, and their document ages, int32.

        Both may be views of what the cursor holds: read them, never write to them.
        """
        piece = self._piece
        if piece.epoch == order.epoch and piece.start <= start and stop <= piece.stop:
            here = slice(start - piece.start, stop - piece.start)
            return piece.tokens[here], piece.document_age[here]

        tokens = np.empty(stop - start, self._source.dtype)
        age = np.empty(stop - start, np.int32)
        position = start
        while position < stop:
            piece = self._piece_at(order, position)
            here = slice(position - piece.start, min(stop, piece.stop) - piece.start)
            there = slice(position - start, min(stop, piece.stop) - start)
            tokens[there], age[there] = piece.tokens[here], piece.document_age[here]
            position = start + there.stop
        return tokens, age

    def _piece_at(self, order: EpochOrder, position: int) -> Piece:
        piece = self._piece
        if piece.epoch != order.epoch or not piece.start <= position < piece.stop:
            piece = self._piece = read_piece(self._source, order, position)
        return piece


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
    tokens, age = LaneCursor(source).read(order, start, stop)
    return tokens.astype(np.int64), age.copy()


def _permute(
    stored: NDArray[Any], starts: NDArray[np.int64], documents: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """A block's tokens with its documents in the order `documents`, and their document ages."""
    lengths = np.diff(np.append(starts, len(stored)))[documents]
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
    age = np.arange(first, stop) - np.repeat(starts[low:high], lengths)
    return np.minimum(age, MAX_AGE).astype(np.int32)
