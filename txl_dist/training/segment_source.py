"""Opens the segments that a rank reads, and refills the memory of its lanes from them.

A checkpoint's memory does not fit if the number of lanes has changed, or if it has become longer.
It is replayed then: the tokens before the position are read again, without scoring. The receptive
field of a token is finite, so the segments in it give the memory that a lane would have if it had
read the whole epoch up to there with the current weights (decision 5 has the argument). Nothing is
trained, and dropout is off. A kind of memory without such a limit is refused.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing

from data_pipeline.errors import counted
from data_pipeline.streams.segment_stream import SegmentStream, segment_pipeline
from data_pipeline.streams.segments import Segment
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError
from txl_dist.model.memory import memory_kind
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.training.context import RankContext
from txl_dist.training.resume import ResumePoint
from txl_dist.training.state import TrainState
from txl_dist.training.step import DeviceSegments, TrainStep

DATA_TIMEOUT_SHARE = 0.9
"""Time limit for one read of the data, as a fraction of training.rank_timeout_seconds."""
PREFETCH_SEGMENTS = 16
"""Size of the queue of segments that a reader thread fills."""


class SegmentSource:
    """Opens the segments of this rank's lanes at a state; at most one stream is open.

    `plan` has the lanes of the phase that is open.
    """

    def __init__(self, rank: RankContext, step: TrainStep) -> None:
        self._rank, self._step, self.plan = rank, step, rank.data.plan
        self._streams = rank.stack.enter_context(ExitStack())

    def open_at(self, state: TrainState) -> Iterator[Segment]:
        """The segments from the position of `state` on."""
        self._streams.close()  # that of superseded steps
        stream = self._streams.enter_context(closing(_open_stream(self._rank, self._step, state)))
        segments, device = segment_pipeline(stream), self._rank.world.device
        # Lanes that are read in turns are selected on the host.
        if device.type != "cpu" and self._rank.config.data.num_turns == 1:
            segments = DeviceSegments(segments, device, is_ready=lambda: stream.has_segment)
            self._step.while_computing = segments.prefetch
        self.plan = self._rank.data.plan_of(state.phases[-1])
        return segments


def refill_memory(rank: RankContext, step: TrainStep, point: ResumePoint, state: TrainState) -> int:
    """Rebuild the memory of all lanes if that of the checkpoint does not fit. Collective.

    Returns the number of tokens per lane that were replayed for it.
    """
    num_segments = segments_to_replay(rank.config, point, state)
    if num_segments:
        with closing(_open_stream(rank, step, state)) as stream:
            _replay(step, stream, num_segments, config=rank.config)
    return num_segments * rank.config.data.tgt_len


def context_segments(config: RunConfig) -> int:
    """Segments that determine the memory; 0 without a memory, or if no number of them does."""
    num_tokens = memory_kind(config.model).receptive_tokens(config.segment_len)
    return -(-(num_tokens or 0) // config.data.tgt_len)


def has_memory_for(config: RunConfig, point: ResumePoint) -> bool:
    """Whether the memory of a checkpoint fits: the same lanes, and rows that can be loaded."""
    has_lanes = len(point.manifest.rank_of_lane) == config.data.num_lanes
    return has_lanes and memory_kind(config.model).fits(point.manifest.architecture)


def segments_to_replay(config: RunConfig, point: ResumePoint, state: TrainState) -> int:
    """How many segments to replay before the first step after a resume; usually none.

    Raises ConfigError if the memory would have to be replayed, and no number of segments is enough.
    """
    phase = state.phases[-1]
    # After a change of the corpora, or at the start of an epoch, lanes start without a memory.
    is_cold = phase.position == state.position and not phase.unread
    if is_cold or has_memory_for(config, point):
        return 0
    if memory_kind(config.model).receptive_tokens(config.segment_len) is None:
        raise ConfigError(
            f"the lanes of {point.path} cannot be given to other lanes or another memory: "
            f"model.memory={config.model.memory} may depend on any earlier token, so it cannot be "
            "read again. Keep data.num_lanes and model.mem_len, or start a new run"
        )
    return context_segments(config)


def _replay(
    step: TrainStep, stream: SegmentStream, num_segments: int, *, config: RunConfig
) -> None:
    """Fill the memory of this rank's lanes as it is before the stream's position. Collective."""
    world = step.world
    world.activity.name = f"replay of {counted(num_segments, 'segment')}"
    fault_point("replay")
    segments = stream.segments_before(num_segments)
    with step.engine.whole_model() as model:
        model.eval()  # or it would draw dropout masks
        for segment in segments:
            step.replay(segment, model, config.precision)
        model.train()


def _open_stream(rank: RankContext, step: TrainStep, state: TrainState) -> SegmentStream:
    data, phase = rank.config.data, state.phases[-1]
    return SegmentStream(
        rank.data.source_of(phase, rank.config),
        rank.data.plan_of(phase),
        lanes=step.lanes,
        num_rows=step.num_rows,
        reset=data.reset,
        ordering=data.ordering,
        seed=rank.config.seed,
        position=state.position,
        prefetch_segments=PREFETCH_SEGMENTS,
        # Before the other ranks give up: then the error that ends the run names the file.
        timeout_seconds=DATA_TIMEOUT_SHARE * rank.config.training.rank_timeout_seconds,
    )
