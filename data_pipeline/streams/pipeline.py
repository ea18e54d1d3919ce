"""A WebDataset pipeline: the segment stream is the source, the user's own stages follow."""

from collections.abc import Callable, Iterable, Iterator

from data_pipeline.streams.segment_stream import SegmentStream
from data_pipeline.streams.segments import Segment

Stage = Callable[[Iterable[Segment]], Iterable[Segment]]


def segment_pipeline(stream: SegmentStream, *stages: Stage) -> Iterator[Segment]:
    """Iterate `wds.DataPipeline(stream, *stages)`; a stage maps an iterable of segments to another.

    A stage may change the content of segments, but not their number or order: the position of the
    last segment that the pipeline returned is the run's reading state.
    """
    # Imported here: webdataset imports torch, which plain data commands do not need.
    import webdataset as wds

    return iter(wds.DataPipeline(stream, *stages))
