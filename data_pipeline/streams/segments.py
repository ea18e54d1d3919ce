"""Segments, cut at any lane position, and the batches of steps, made of their rows.

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

The code of the paper lets a lane's memory continue into the next document (`reset: stream`). With
`reset: document`, `age` limits attention to the current document.

Source: segment-level recurrence, Dai et al. 2019, arXiv:1901.02860, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from data_pipeline.streams.cursor import LaneCursor, rising_ages
from data_pipeline.streams.lanes import EpochRange, LanePlan
from data_pipeline.streams.mixture import MixedSource, source_of_epoch
from data_pipeline.streams.order import EpochOrder, Ordering

if TYPE_CHECKING:
    from data_pipeline.shards.shard_reader import TokenSource

Reset = Literal["document", "stream"]
"""What the age of a token counts from: its document's first token, or its lane's text without a
break (`LanePlan.token_ranges`), usually the lane's slice."""

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
    """Lane position of the next segment: the complete reading state to save."""


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


def in_turns(
    plan: LanePlan, lanes: Sequence[int], *, num_rows: int, turn: int = 0
) -> Callable[[Iterable[Segment]], Iterator[Batch]]:
    """The stage of a pipeline that divides segments of `lanes` into batches of `num_rows` rows.

    `turn` is that of the first batch: the first segment was read in the turns before it.
    """
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
        """The next `num_segments` segments from lane position `position` on.

        Reads all of them lane by lane: for short segments, most of the time is call overhead.
        """
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
            ages.append(rising_ages(age, age + len(document_age)))
        if piece_len is not None:
            ages.append((np.arange(start, stop) % piece_len).astype(np.int32))
        return reduce(np.minimum, ages)

    def _open_epoch(self, epoch: int) -> tuple[TokenSource, EpochOrder]:
        source = source_of_epoch(self._source, epoch)
        return source, EpochOrder.of(
            source.block_tokens, seed=self._seed, epoch=epoch, ordering=self._ordering
        )
