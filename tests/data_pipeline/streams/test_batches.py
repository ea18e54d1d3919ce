"""Batches of lanes in turns: together they are the segments, from any turn on, on any rank."""

import itertools

import pytest
from numpy.testing import assert_array_equal

from data_pipeline.streams.batches import NO_LANE, Batch, in_turns, pipeline, rows_of_segments
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.segments import IGNORED
from tests.data_pipeline.streams.numbered_stream import stream_of
from tests.support.token_sources import NumberedSource

SOURCE = NumberedSource([400])
NUM_LANES, NUM_TURNS, NUM_SEGMENTS = 7, 3, 9
PLAN = LanePlan(num_tokens=400, num_lanes=NUM_LANES, tgt_len=4, num_turns=NUM_TURNS)
"""The lanes of two ranks: 0 to 2, and 3 to 6."""


def batches(lanes: range, *, turn: int = 0) -> list[Batch]:
    num_rows = PLAN.rows_per_rank(2)
    options = {"lanes": lanes, "num_rows": rows_of_segments(PLAN, lanes, num_rows=num_rows)}
    with stream_of(SOURCE, num_lanes=NUM_LANES, **options) as stream:
        stage = in_turns(PLAN, lanes, num_rows=num_rows, turn=turn)
        return [*itertools.islice(pipeline(stream, stage), NUM_SEGMENTS * NUM_TURNS - turn)]


def rows(read: list[Batch], lane: int) -> list[tuple[int, list[list[int]]]]:
    """(position, input, target and age) of a lane in these batches."""
    return [
        (
            batch.position,
            [column[row].tolist() for column in (batch.input, batch.target, batch.age)],
        )
        for batch in read
        for row, other in enumerate(batch.lanes)
        if other == lane
    ]


def test_every_lane_reads_its_segments_once_and_the_targets_of_a_step_are_known() -> None:
    ranks = [batches(PLAN.lanes_of_rank(rank, 2)) for rank in range(2)]
    with stream_of(SOURCE, num_lanes=NUM_LANES) as stream:
        segments = [*itertools.islice(stream, NUM_SEGMENTS)]
    for lane in range(NUM_LANES):
        expected = [
            (each.position, [x[lane].tolist() for x in (each.input, each.target, each.age)])
            for each in segments
        ]
        assert rows(ranks[lane >= 3], lane) == expected
    for step in zip(*ranks, strict=True):
        lanes = [lane for batch in step for lane in batch.lanes if lane != NO_LANE]
        assert lanes == [*PLAN.lanes_of_turn(step[0].turn)]
        counted = sum(int((batch.target != IGNORED).sum()) for batch in step)
        assert [batch.num_targets for batch in step] == [counted] * 2
        for batch in step:
            assert len(batch.lanes) == len(batch.input) == PLAN.rows_per_rank(2)
            padding = [lane == NO_LANE for lane in batch.lanes]
            assert (batch.target[padding] == IGNORED).all()


@pytest.mark.parametrize("turn", range(NUM_TURNS))
def test_a_run_that_begins_inside_a_round_reads_on(turn: int) -> None:
    lanes = PLAN.lanes_of_rank(1, 2)
    for batch, expected in zip(batches(lanes, turn=turn), batches(lanes)[turn:], strict=True):
        assert (batch.turn, batch.lanes) == (expected.turn, expected.lanes)
        assert_array_equal(batch.input, expected.input)
        assert batch.next_turn == (batch.turn + 1) % NUM_TURNS
