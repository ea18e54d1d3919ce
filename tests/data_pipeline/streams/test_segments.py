"""Segments: an example with every number written out, what is read, invalid arguments, and turns.

That the right tokens are read in every case is tests/properties/test_contiguity.py.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from data_pipeline.shards.manifest import ShardManifest
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.streams import segments
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.order import ORDERINGS
from data_pipeline.streams.segment_stream import SegmentStream, pipeline
from data_pipeline.streams.segments import (
    IGNORED,
    NO_LANE,
    Batch,
    SegmentReader,
    in_turns,
    read_range,
)
from tests.data_pipeline.streams.numbered_stream import plan_of, stream_of
from tests.support.token_sources import NumberedSource


def test_two_lanes_of_one_epoch_have_these_numbers() -> None:
    source = NumberedSource([3, 2], [5, 3])  # 13 tokens: lanes read 0 .. 5 and 6 .. 11
    with stream_of(source, shuffle="none") as stream:
        first, second = itertools.islice(stream, 2)

    assert_array_equal(first.input, [[0, 1, 2, 3], [6, 7, 8, 9]])
    assert_array_equal(first.target, [[1, 2, 3, 4], [7, 8, 9, 10]])
    assert_array_equal(first.age, [[0, 1, 2, 0], [0, 1, 2, 3]])
    assert (first.position, first.next_position) == (0, 4)
    dtypes = [array.dtype for array in (first.input, first.target, first.age)]
    assert dtypes == ["i8", "i8", "i4"], "as torch needs them"

    assert_array_equal(second.input, [[4, 5, 0, 1], [10, 11, 6, 7]])
    assert_array_equal(second.target, [[5, IGNORED, 1, 2], [11, IGNORED, 7, 8]])
    assert_array_equal(second.age, [[1, 0, 0, 1], [0, 1, 0, 1]])
    assert second.next_position == stream.position == 8


@pytest.mark.parametrize("shuffle", ["blocks", "none"])
def test_an_epoch_of_real_shards_contains_every_document_uncut(
    dataset: tuple[Path, ShardManifest], shuffle: Any
) -> None:
    directory, manifest = dataset
    source = open_split(directory, "train", manifest=manifest)
    tokens, document_age = read_range(source, 0, source.num_tokens)
    assert (tokens[document_age == 0] == manifest.end_of_document).all()

    plan = LanePlan(num_tokens=source.num_tokens, num_lanes=1, tgt_len=64)
    with SegmentStream(source, plan, lanes=range(1), ordering=ORDERINGS[shuffle]) as stream:
        read = list(itertools.islice(stream, -(-source.num_tokens // 64)))
    read_tokens = np.concatenate([s.input[0] for s in read])[: source.num_tokens]
    read_age = np.concatenate([s.age[0] for s in read])[: source.num_tokens]
    stored = documents_of(tokens, document_age)
    streamed = documents_of(read_tokens, read_age)
    assert sorted(streamed) == sorted(stored)
    assert (streamed == stored) is (shuffle == "none")


def documents_of(tokens: np.ndarray, age: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(tokens, np.flatnonzero(age == 0)[1:])]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lanes": range(1, 3)}, "lanes="),
        ({"position": -4}, "position=-4"),
        ({"prefetch_segments": 0}, "prefetch_segments=0"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream_of(NumberedSource([1000]), **options)


def test_a_plan_or_range_of_other_data_is_refused() -> None:
    with pytest.raises(ValueError, match="not a range of 13 tokens"):
        read_range(NumberedSource([3, 2], [5, 3]), 1, 14)
    plan = LanePlan(num_tokens=999, num_lanes=2, tgt_len=4)
    with pytest.raises(ValueError, match=r"plan for 999 tokens, source of 1,000"):
        SegmentStream(NumberedSource([1000]), plan, lanes=range(2))


# --- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", ["blocks", "none"])
def test_a_seek_reads_at_most_two_blocks_per_lane(shuffle: Any) -> None:
    source = NumberedSource(*[[60, 40]] * 500)
    plan = plan_of(source, num_lanes=3, tgt_len=8)
    options = {"reset": "document", "ordering": ORDERINGS[shuffle], "seed": 1}
    reader = SegmentReader(source, plan, lanes=range(3), **options)
    for position in (0, 16_000, 90_000_003, 5):
        source.reads.clear()
        reader.read(position, 1)
        assert len(source.reads) <= 2 * plan.num_lanes, "a block, or two where a segment meets both"


def test_a_giant_document_is_read_in_bounded_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "CHUNK_TOKENS", 100)
    source = NumberedSource([10_000])
    with stream_of(source, num_lanes=1, tgt_len=32, position=5_040) as stream:
        read = np.concatenate([s.input[0] for s in itertools.islice(stream, 100)])
    assert_array_equal(read, np.arange(5_040, 5_040 + 3_200))
    assert source.reads[0] == (0, 5_040, 5_100)
    assert max(stop - start for _, start, stop in source.reads) == 100
    assert len(source.reads) == len(set(source.reads)), "nothing is read twice"


def test_reading_forwards_reads_every_block_once() -> None:
    source = NumberedSource(*[[60, 40]] * 50)
    with stream_of(source, num_lanes=1, tgt_len=8) as stream:
        list(itertools.islice(stream, 5000 // 8 - 10))
    blocks = [block for block, _, _ in source.reads]
    assert len(blocks) == len(set(blocks))


# --- batches of lanes in turns --------------------------------------------------------------------


SOURCE = NumberedSource([400])
NUM_LANES, NUM_TURNS, NUM_SEGMENTS = 7, 3, 9
PLAN = LanePlan(num_tokens=400, num_lanes=NUM_LANES, tgt_len=4, num_turns=NUM_TURNS)
"""The lanes of two ranks: 0 to 2, and 3 to 6."""


def batches(lanes: range, *, turn: int = 0) -> list[Batch]:
    with stream_of(SOURCE, num_lanes=NUM_LANES, lanes=lanes) as stream:
        stage = in_turns(PLAN, lanes, num_rows=PLAN.rows_per_rank(2), turn=turn)
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
        whole = [*itertools.islice(stream, NUM_SEGMENTS)]
    for lane in range(NUM_LANES):
        expected = [
            (each.position, [x[lane].tolist() for x in (each.input, each.target, each.age)])
            for each in whole
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
            assert not batch.input[padding].any()
            assert not batch.age[padding].any()
            for array in (batch.input, batch.target, batch.age):
                assert array.flags.c_contiguous
                assert array.flags.writeable
