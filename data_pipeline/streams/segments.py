"""Segments: the tokens, targets and ages that each step reads, cut at any lane position.

`SegmentReader` cuts segments for some lanes of a plan. `segment_stream.py` calls it in a
thread, before the training loop needs the segments.

The code of the paper lets a lane's memory continue into the next document (`reset: stream`). With
`reset: document`, `age` limits attention to the current document.

Source: segment-level recurrence, Dai et al. 2019, arXiv:1901.02860, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.streams.cursor import LaneCursor, rising_ages
from data_pipeline.streams.lanes import EpochRange, LanePlan
from data_pipeline.streams.mixture import MixedSource, source_of_epoch
from data_pipeline.streams.order import EpochOrder, Shuffle

if TYPE_CHECKING:
    from data_pipeline.shards.shard_reader import TokenSource

Reset = Literal["document", "stream"]
"""What the age of a token counts from: its document's first token, or its lane's slice."""

IGNORED = -1
"""A target that is not scored."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The input of one step on one rank: B rows (lanes, then padding) of T = tgt_len tokens."""

    input: NDArray[np.int64]
    """[B, T] token ids; 0 in rows of padding."""
    target: NDArray[np.int64]
    """[B, T] the next token of the lane; IGNORED at a slice's end and in rows of padding."""
    age: NDArray[np.int32]
    """[B, T] tokens since the start of the lane's slice or, under reset `document`, since the start
    of the document if that is later. Key j is visible to query i only if i - j <= age(i)."""
    position: int
    """Lane position of the first token."""
    next_position: int
    """Lane position of the next segment: the complete reading state to save."""


class _Epoch(NamedTuple):
    source: TokenSource
    order: EpochOrder


class SegmentReader:
    """Cuts segments of some lanes. Reading forwards is fast; a jump reads one chunk per lane."""

    def __init__(
        self,
        source: TokenSource | MixedSource,
        plan: LanePlan,
        *,
        lanes: Sequence[int],
        num_rows: int,
        reset: Reset,
        shuffle: Shuffle,
        seed: int,
    ) -> None:
        num_tokens = int(source_of_epoch(source, plan.first_epoch).block_tokens.sum())
        if plan.num_tokens != num_tokens:
            raise ValueError(f"plan for {plan.num_tokens:,} tokens, source of {num_tokens:,}")
        if not all(0 <= lane < plan.num_lanes for lane in lanes) or num_rows < len(lanes):
            raise ValueError(
                f"lanes={lanes} must be in 0 .. {plan.num_lanes - 1} and fit num_rows={num_rows}"
            )
        self._source, self._plan = source, plan
        self._reset, self._shuffle, self._seed = reset, shuffle, seed
        self.num_rows = num_rows
        self._starts = [plan.slice_start(lane) for lane in lanes]
        # Lanes are far apart: a shared cursor would read one chunk per lane and step.
        self._cursors = [LaneCursor() for _ in lanes]
        self._epochs: dict[int, _Epoch] = {}

    def read(self, position: int, num_segments: int) -> list[Segment]:
        """The next `num_segments` segments from lane position `position` on.

        Reads all of them lane by lane: for short segments, most of the time is call overhead.
        """
        # Shapes: K segments, B rows, T tokens of a segment
        num_rows, tgt_len = self.num_rows, self._plan.tgt_len
        stop = position + num_segments * tgt_len
        shape_KBT = (num_segments, num_rows, tgt_len)
        shape_KT = (num_segments, tgt_len)
        input_KBT, target_KBT = np.empty(shape_KBT, np.int64), np.empty(shape_KBT, np.int64)
        age_KBT = np.empty(shape_KBT, np.int32)

        slice_age_KT = self._slice_age(position, stop).reshape(shape_KT)
        # One token more than the inputs: the last target.
        epoch_ranges = self._plan.epoch_ranges(position, stop + 1)
        epochs = self._epochs_of(epoch_ranges)
        for row in range(len(self._cursors)):
            tokens, document_age = self._read_lane(row, epoch_ranges, epochs)
            input_KBT[:, row] = tokens[:-1].reshape(shape_KT)
            target_KBT[-1, row, -1] = tokens[-1]
            if self._reset == "document":
                np.minimum(document_age[:-1].reshape(shape_KT), slice_age_KT, out=age_KBT[:, row])
            else:
                age_KBT[:, row] = slice_age_KT

        # Targets are the inputs shifted by one token. Copied from the inputs, which are int64
        # already: converting the tokens a second time costs more than this copy.
        target_KBT[:, :, :-1] = input_KBT[:, :, 1:]
        target_KBT[:-1, :, -1] = input_KBT[1:, :, 0]
        ends = np.asarray(self._plan.slice_ends(position, stop), np.int64) - position
        target_KBT[ends // tgt_len, :, ends % tgt_len] = IGNORED
        padding = slice(len(self._cursors), None)
        input_KBT[:, padding], target_KBT[:, padding], age_KBT[:, padding] = 0, IGNORED, 0
        return [
            Segment(input_BT, target_BT, age_BT, first, first + tgt_len)
            for input_BT, target_BT, age_BT, first in zip(
                input_KBT, target_KBT, age_KBT, range(position, stop, tgt_len), strict=True
            )
        ]

    def _read_lane(
        self, row: int, epoch_ranges: list[EpochRange], epochs: list[_Epoch]
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Tokens and document ages of one row's lane, over consecutive epoch_ranges."""
        cursor, slice_start = self._cursors[row], self._starts[row]
        runs = [
            cursor.read(*epoch, slice_start + part.start, slice_start + part.stop)
            for part, epoch in zip(epoch_ranges, epochs, strict=True)
        ]
        if len(runs) == 1:
            return runs[0]
        tokens, ages = zip(*runs, strict=True)
        return np.concatenate(tokens), np.concatenate(ages)

    def _slice_age(self, start: int, stop: int) -> NDArray[np.int32]:
        """Tokens since the slice's start at lane positions [start, stop), the same in all lanes."""
        ages = [rising_ages(part.start, part.stop) for part in self._plan.epoch_ranges(start, stop)]
        return ages[0] if len(ages) == 1 else np.concatenate(ages)

    def _epochs_of(self, epoch_ranges: list[EpochRange]) -> list[_Epoch]:
        """The epoch of each part. Keeps only these, usually one, for the next call."""
        self._epochs = {
            part.epoch: self._epochs.get(part.epoch) or self._open_epoch(part.epoch)
            for part in epoch_ranges
        }
        return list(self._epochs.values())

    def _open_epoch(self, epoch: int) -> _Epoch:
        source = source_of_epoch(self._source, epoch)
        order = EpochOrder.of(
            source.block_tokens, seed=self._seed, epoch=epoch, shuffle=self._shuffle
        )
        return _Epoch(source, order)
