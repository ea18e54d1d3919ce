"""Opens the segments that a rank reads, and refills the memory of its lanes from them."""

from collections.abc import Iterator
from contextlib import ExitStack, closing

from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.pipeline import segment_pipeline
from data_pipeline.streams.segment_stream import SegmentStream
from data_pipeline.streams.segments import Segment
from txl_dist.training.begin import RankContext
from txl_dist.training.replay import replay, segments_to_replay
from txl_dist.training.resume_point import ResumePoint
from txl_dist.training.state import TrainState
from txl_dist.training.step import DeviceSegments, TrainStep

DATA_TIMEOUT_SHARE = 0.9
"""Time limit for one read of the data, as a fraction of training.rank_timeout_seconds."""


class SegmentSource:
    """Opens the segments of this rank's lanes at a state; at most one stream is open."""

    def __init__(self, rank: RankContext, step: TrainStep) -> None:
        self._rank, self._step = rank, step
        self._streams = rank.stack.enter_context(ExitStack())

    def open_at(self, state: TrainState) -> tuple[LanePlan, Iterator[Segment]]:
        """The lanes of the current phase, and the segments from the position of `state` on."""
        self._streams.close()  # that of an abandoned trajectory
        stream = self._streams.enter_context(closing(_open_stream(self._rank, self._step, state)))
        segments, device = segment_pipeline(stream), self._rank.world.device
        if device.type != "cpu":
            segments = DeviceSegments(segments, device, is_ready=lambda: stream.has_segment)
            self._step.while_computing = segments.prefetch
        return self._rank.data.plan_of(state.phases[-1]), segments


def refill_memory(rank: RankContext, step: TrainStep, point: ResumePoint, state: TrainState) -> int:
    """Rebuild the memory of all lanes if that of the checkpoint does not fit. Collective.

    Returns the number of tokens per lane that were replayed for it.
    """
    num_segments = segments_to_replay(rank.config, point, state)
    if num_segments:
        with closing(_open_stream(rank, step, state)) as stream:
            replay(step, stream, num_segments, config=rank.config)
    return num_segments * rank.config.data.tgt_len


def _open_stream(rank: RankContext, step: TrainStep, state: TrainState) -> SegmentStream:
    data, phase = rank.config.data, state.phases[-1]
    return SegmentStream(
        rank.data.source_of(phase, rank.config),
        rank.data.plan_of(phase),
        lanes=step.lanes,
        num_rows=len(step.lane_of_row),
        reset=data.reset,
        shuffle=data.order,
        seed=rank.config.seed,
        position=state.position,
        prefetch_segments=data.prefetch_segments,
        # Before the other ranks give up: then the error that ends the run names the file.
        timeout_seconds=DATA_TIMEOUT_SHARE * rank.config.training.rank_timeout_seconds,
    )
