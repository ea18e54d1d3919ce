"""A segment stream as the source of a WebDataset pipeline."""

import itertools
from collections.abc import Iterator

import webdataset as wds

from data_pipeline.streams.pipeline import segment_pipeline
from data_pipeline.streams.segments import Segment
from tests.data_pipeline.streams.numbered_stream import stream_of
from tests.support.token_sources import NumberedSource


def test_a_new_pipeline_continues_at_the_streams_position() -> None:
    def shifted(segments: Iterator[Segment]) -> Iterator[tuple[int, int]]:
        for segment in segments:
            yield segment.position, int(segment.input[0, 0]) + 1

    stages = shifted, wds.map(lambda pair: pair)
    with stream_of(NumberedSource([1000]), num_lanes=1) as stream:
        pipeline = segment_pipeline(stream, *stages)
        assert list(itertools.islice(pipeline, 3)) == [(0, 1), (4, 5), (8, 9)]
        repeated = segment_pipeline(stream, *stages)
        assert list(itertools.islice(repeated, 2)) == [(12, 13), (16, 17)]
