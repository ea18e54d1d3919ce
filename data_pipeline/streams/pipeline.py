"""Segments through WebDataset: the stream is the source, a user's stages come behind it."""

from collections.abc import Callable, Iterable, Iterator

from data_pipeline.streams.segment_stream import SegmentStream
from data_pipeline.streams.segments import Segment

Stage = Callable[[Iterable[Segment]], Iterable[Segment]]


def segment_pipeline(stream: SegmentStream, *stages: Stage) -> Iterator[Segment]:
    """Iterate `wds.DataPipeline(stream, *stages)`; a stage maps an iterable of segments to another.

    A stage may change what a segment holds, not how many there are or their order: the position of
    the last segment that came out is the run's reading state.
    """
    import webdataset as wds

    return iter(wds.DataPipeline(stream, *stages))
