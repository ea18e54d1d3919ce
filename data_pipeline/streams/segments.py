"""Segments, cut at any lane position, and the batches of steps, made of their rows.

A `LaneCursor` reads tokens and their ages at any position of an epoch's order, in chunks. With
shuffled documents a chunk is a whole block; otherwise at most `CHUNK_TOKENS` of one. A block of one
document is not shuffled, so a document larger than RAM is never read as a whole. A cursor keeps one
chunk and returns ranges inside it without a copy. A jump to any position reads one chunk.

`SegmentReader` cuts the segments of some lanes of a plan. `segment_stream.py` calls it in a thread,
before the training loop needs the segments. `in_turns` divides them into batches:

    SegmentStream -> segments of all lanes of the rank -> `in_turns` -> one batch per step

A step reads all lanes, or every `num_turns`-th one (`LanePlan`): then several steps share a
segment, and each reads the rows of the lanes whose turn it is.

    lanes of the rank  0 1 2 3 4 5      num_turns = 3
    segment at p       turn 0: 0 3      turn 1: 1 4      turn 2: 2 5
    segment at p + T   turn 0: 0 3      ...

So the reading state of a run is a lane position and a turn: the lanes of earlier turns are one
segment ahead of the others.

Source: segment-level recurrence, Dai et al. 2019, arXiv:1901.02860, section 3.2.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from data_pipeline.shards.shard_reader import TokenSource
from data_pipeline.streams.lanes import EpochRange, LanePlan
from data_pipeline.streams.mixture import MixedSource, source_of_epoch
from data_pipeline.streams.order import ORDERINGS, EpochOrder, Ordering

Reset = Literal["document", "stream"]
"""What the age of a token counts from: its document's first token, or its lane's text without a
break (`LanePlan.token_ranges`), usually the lane's slice."""

CHUNK_TOKENS = 1 << 18
MAX_AGE = int(np.iinfo(np.int32).max)
"""Ages are capped here. No memory is that long, so the cap changes no attention mask."""
IGNORED = -1
"""A target that is not scored."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """T = tgt_len tokens of each of B lanes."""

    input: NDArray[np.int64]
    """[B, T] token ids."""
    target: NDArray[np.int64]
    """[B, T] the next token of the text, which is the next one of the lane too except at the end of
    a piece; IGNORED where the lane breaks off, as at a slice's end."""
    age: NDArray[np.int32]
    """[B, T] tokens since the text of the lane last broke off, as at the end of a piece, or, under
    reset `document`, since the start of the document if that is later. Key j is visible to query i
    only if i - j <= age(i)."""
    position: int
    """Lane position of the first token."""
    next_position: int
    """Lane position of the next segment: with the turn, the complete reading state."""


NO_LANE = -1
"""The lane of rows of padding: all ranks compute as many rows as the rank with the most lanes."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Segment):
    """The input of one step on one rank: the rows of a segment that it reads, then padding, whose
    inputs and ages are 0 and whose targets are IGNORED."""

    lanes: Sequence[int]
    """[B] the lane of each row; NO_LANE in rows of padding."""
    num_targets: int
    """Targets of the step on all ranks, known before any of them is scored: every rank divides its
    sum of losses by the same number."""
    turn: int
    next_turn: int
    """That of the next batch; 0 if it begins at `next_position`, else it begins at `position`."""
    breaks_off: bool = field(default=False, kw_only=True)
    """Whether the text of all lanes breaks off before the last token, as where an epoch ends."""


def in_turns(
    plan: LanePlan, lanes: Sequence[int], *, num_rows: int, turn: int = 0
) -> Callable[[Iterable[Segment]], Iterator[Batch]]:
    """The stage of a pipeline that divides segments of `lanes` into batches of `num_rows` rows, of
    which the first is that of `turn`."""
    row_of_lane = {lane: row for row, lane in enumerate(lanes)}
    lanes_of_turns = plan.lanes_in_turns(lanes)

    def divide(segments: Iterable[Segment]) -> Iterator[Batch]:
        first_turn = turn
        for segment in segments:
            for number in range(first_turn, plan.num_turns):
                lanes_of_turn = lanes_of_turns[number]
                rows = [row_of_lane[lane] for lane in lanes_of_turn]
                yield Batch(
                    _padded(segment.input[rows], num_rows, 0),
                    _padded(segment.target[rows], num_rows, IGNORED),
                    _padded(segment.age[rows], num_rows, 0),
                    position=segment.position,
                    next_position=segment.next_position,
                    lanes=[*lanes_of_turn, *[NO_LANE] * (num_rows - len(rows))],
                    num_targets=plan.targets_in_step(segment.position, number),
                    turn=number,
                    next_turn=(number + 1) % plan.num_turns,
                    breaks_off=bool(plan.slice_ends(segment.position, segment.next_position - 1)),
                )
            first_turn = 0

    return divide


def _padded(array: NDArray[Any], num_rows: int, filler: int) -> NDArray[Any]:
    """`array` [rows, T] with rows of `filler` after its own, [num_rows, T]."""
    padding = np.full((num_rows - len(array), array.shape[1]), filler, array.dtype)
    return np.concatenate([array, padding])


class SegmentReader:
    """Cuts segments of some lanes. Reading forwards is fast; a jump reads one chunk per lane."""

    def __init__(
        self,
        source: TokenSource | MixedSource,
        plan: LanePlan,
        *,
        lanes: Sequence[int],
        reset: Reset,
        ordering: Ordering,
        seed: int,
    ) -> None:
        num_tokens = int(source_of_epoch(source, plan.first_epoch).block_tokens.sum())
        if plan.num_tokens != num_tokens:
            raise ValueError(f"plan for {plan.num_tokens:,} tokens, source of {num_tokens:,}")
        if not all(0 <= lane < plan.num_lanes for lane in lanes):
            raise ValueError(f"lanes={lanes} must be in 0 .. {plan.num_lanes - 1}")
        self._source, self._plan = source, plan
        self._reset, self._ordering, self._seed = reset, ordering, seed
        self._lanes = lanes
        # Lanes are far apart: a shared cursor would read one chunk per lane and step.
        self._cursors = [LaneCursor() for _ in lanes]
        self._epoch = lru_cache(maxsize=2)(self._open_epoch)  # a read needs one, rarely two

    def read(self, position: int, num_segments: int) -> list[Segment]:
        """The next `num_segments` segments from lane position `position` on."""
        # Read lane by lane: for short segments, most of the time is call overhead.
        # Shapes: K segments, B lanes, T tokens of a segment
        tgt_len = self._plan.tgt_len
        stop = position + num_segments * tgt_len
        shape_KBT = (num_segments, len(self._lanes), tgt_len)
        shape_KT = (num_segments, tgt_len)
        input_KBT, target_KBT = np.empty(shape_KBT, np.int64), np.empty(shape_KBT, np.int64)
        age_KBT = np.empty(shape_KBT, np.int32)

        # One token more than the inputs: the last target.
        epoch_ranges = self._plan.epoch_ranges(position, stop + 1)
        ends = []
        for row in range(len(self._lanes)):
            tokens, age, following, lasts = self._read_lane(row, epoch_ranges)
            input_KBT[:, row] = tokens[:-1].reshape(shape_KT)
            age_KBT[:, row] = age[:-1].reshape(shape_KT)
            if following is None:
                target_KBT[-1, row, -1] = tokens[-1]
            else:
                target_KBT[:, row] = following[:-1].reshape(shape_KT)
            ends += [(last // tgt_len, row, last % tgt_len) for last in lasts]

        if self._ordering.piece_len is None:
            # Targets are the inputs shifted by one token. Copied from the inputs, which are int64
            # already: converting the tokens a second time costs more than this copy.
            target_KBT[:, :, :-1] = input_KBT[:, :, 1:]
            target_KBT[:-1, :, -1] = input_KBT[1:, :, 0]
        if ends:
            target_KBT[tuple(np.transpose(ends))] = IGNORED
        return [
            Segment(input_BT, target_BT, age_BT, first, first + tgt_len)
            for input_BT, target_BT, age_BT, first in zip(
                input_KBT, target_KBT, age_KBT, range(position, stop, tgt_len), strict=True
            )
        ]

    def _read_lane(
        self, row: int, epoch_ranges: list[EpochRange]
    ) -> tuple[NDArray[Any], NDArray[np.int32], NDArray[Any] | None, list[int]]:
        """Tokens and ages of one row's lane, the tokens that follow them if the order has pieces,
        and the indices of tokens that have no target."""
        parts, num_tokens = [], 0
        for epoch_range in epoch_ranges:
            num_tokens += epoch_range.stop - epoch_range.start
            source, order = self._epoch(epoch_range.epoch)
            for start, stop, age in self._plan.token_ranges(self._lanes[row], epoch_range):
                tokens, document_age, following = self._cursors[row].read(
                    source, order, start, stop
                )
                parts.append((tokens, self._age(document_age, age, start), following))
        if len(parts) == 1 and len(parts[0][0]) == num_tokens:
            return *parts[0], []
        lengths = [len(tokens) for tokens, _, _ in parts]
        if missing := num_tokens - sum(lengths):  # before the first token that can be replayed
            zeros = np.zeros(missing, self._source.dtype)
            parts.insert(0, (zeros, np.zeros(missing, np.int32), zeros))
            lengths.insert(0, missing)
        all_tokens, ages, all_following = zip(*parts, strict=True)
        following = None if all_following[-1] is None else np.concatenate(all_following)
        ends = np.cumsum(lengths[:-1]) - 1
        return np.concatenate(all_tokens), np.concatenate(ages), following, ends.tolist()

    def _age(self, document_age: NDArray[np.int32], age: int, start: int) -> NDArray[np.int32]:
        """Ages of consecutive tokens from position `start` of the order on; the lane has `age`
        tokens directly before the first."""
        piece_len, stop = self._ordering.piece_len, start + len(document_age)
        ages = [document_age] if self._reset == "document" else []
        # If the lane has the document's start, the document is younger at all of these tokens.
        if not ages or document_age[0] > age:
            rising = np.arange(age, age + len(document_age))
            ages.append(np.minimum(rising, MAX_AGE).astype(np.int32))
        if piece_len is not None:
            ages.append((np.arange(start, stop) % piece_len).astype(np.int32))
        return reduce(np.minimum, ages)

    def _open_epoch(self, epoch: int) -> tuple[TokenSource, EpochOrder]:
        source = source_of_epoch(self._source, epoch)
        return source, EpochOrder.of(
            source.block_tokens, seed=self._seed, epoch=epoch, ordering=self._ordering
        )


# --- reading the tokens of an epoch's order -------------------------------------------------------


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
    (start, stop), pieces = order.pieces(position)
    text = replace(order, ordering=replace(order.ordering, piece_len=None))
    tokens, age, _ = LaneCursor().read(source, text, start, min(stop + 1, order.num_tokens))
    place = np.concatenate([np.arange(first - start, end - start) for first, end in pieces])
    following = tokens[np.minimum(place + 1, len(tokens) - 1)]
    return TokenChunk(order.epoch, start, stop, tokens[place], age[place], following)


class LaneCursor:
    """Reads ranges of tokens for one lane. Consecutive ranges are fastest. Not thread-safe."""

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
