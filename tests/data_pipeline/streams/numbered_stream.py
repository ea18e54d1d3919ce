"""Streams over numbered tokens, for the tests of this folder."""

from typing import Any

from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.order import ORDERINGS
from data_pipeline.streams.segment_stream import SegmentStream
from tests.support.token_sources import NumberedSource


def plan_of(source: NumberedSource, num_lanes: int, tgt_len: int) -> LanePlan:
    num_tokens = int(source.block_tokens.sum())
    return LanePlan(num_tokens=num_tokens, num_lanes=num_lanes, tgt_len=tgt_len)


def stream_of(
    source: NumberedSource,
    *,
    num_lanes: int = 2,
    tgt_len: int = 4,
    shuffle: str = "blocks",
    **options: Any,
) -> SegmentStream:
    options = {"lanes": range(num_lanes), "ordering": ORDERINGS[shuffle], **options}
    return SegmentStream(source, plan_of(source, num_lanes, tgt_len), **options)
