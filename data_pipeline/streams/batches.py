"""Batches: what one training step reads on one rank, as the last stage of a WebDataset pipeline.

    SegmentStream -> segments of all lanes of the rank -> `in_turns` -> one batch per step

A step reads all lanes, or every `num_turns`-th one (`LanePlan`): then several steps share a
segment, and each reads the rows of the lanes whose turn it is.

    lanes of the rank  0 1 2 3 4 5      num_turns = 3
    segment at p       turn 0: 0 3      turn 1: 1 4      turn 2: 2 5
    segment at p + T   turn 0: 0 3      ...

So the reading state of a run is a lane position and a turn: the lanes of earlier turns are one
segment ahead of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.segments import Segment

if TYPE_CHECKING:
    from data_pipeline.streams.segment_stream import SegmentStream

NO_LANE = -1
"""The lane of rows of padding: all ranks compute as many rows as the rank with the most lanes."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Segment):
    """The input of one step on one rank: the rows of a segment that it reads."""

    lanes: Sequence[int]
    """[B] the lane of each row; NO_LANE in rows of padding, which are last."""
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
                num_missing = num_rows - len(lanes_of_turn)
                arrays = segment.input, segment.target, segment.age
                if plan.num_turns > 1:  # after the rows of lanes, a segment has one of padding
                    rows = [row_of_lane[lane] for lane in lanes_of_turn]
                    rows += [len(lanes)] * num_missing
                    arrays = segment.input[rows], segment.target[rows], segment.age[rows]
                yield Batch(
                    *arrays,
                    position=segment.position,
                    next_position=segment.next_position,
                    lanes=[*lanes_of_turn, *[NO_LANE] * num_missing],
                    num_targets=plan.targets_in_step(segment.position, number),
                    turn=number,
                    next_turn=(number + 1) % plan.num_turns,
                )
            first_turn = 0

    return divide


def rows_of_segments(plan: LanePlan, lanes: Sequence[int], *, num_rows: int) -> int:
    """Rows of the segments from which `in_turns` makes batches of `num_rows` rows."""
    return num_rows if plan.num_turns == 1 else len(lanes) + 1


def pipeline(stream: SegmentStream, *stages: Callable[..., Any]) -> Iterator[Any]:
    """Iterate `wds.DataPipeline(stream, *stages)`; a stage maps an iterable of segments to another.

    A stage may change the content of segments, but not their number or order, except to divide each
    as `in_turns` does: the last segment that the pipeline returned is the run's reading state.
    """
    # Imported here: webdataset imports torch, which plain data commands do not need.
    import webdataset as wds

    return iter(wds.DataPipeline(stream, *stages))
