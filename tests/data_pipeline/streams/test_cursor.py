"""The cursor: which blocks a seek reads, in what chunks, and the ages."""

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from data_pipeline.streams import segments
from data_pipeline.streams.order import ORDERINGS
from data_pipeline.streams.segments import SegmentReader, read_range
from tests.data_pipeline.streams.numbered_stream import plan_of, stream_of
from tests.support.token_sources import NumberedSource


def test_a_range_of_the_split_keeps_ages_from_before_its_start() -> None:
    source = NumberedSource([3, 2], [5, 3])
    tokens, document_age = read_range(source, 1, 9)
    assert tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert document_age.tolist() == [1, 2, 0, 1, 0, 1, 2, 3]
    with pytest.raises(ValueError, match="not a range of 13 tokens"):
        read_range(source, 1, 14)


@pytest.mark.parametrize("shuffle", ["blocks", "none"])
def test_a_seek_reads_at_most_two_blocks_per_lane(shuffle: Any) -> None:
    source = NumberedSource(*[[60, 40]] * 500)
    plan = plan_of(source, num_lanes=3, tgt_len=8)
    reader = SegmentReader(
        source,
        plan,
        lanes=range(3),
        reset="document",
        ordering=ORDERINGS[shuffle],
        seed=1,
    )
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
