"""Replay: fills the memory of lanes by reading the tokens before them again, without scoring.

A checkpoint's memory does not fit if the number of lanes has changed, or if it has become longer.
The receptive field of a token is finite: the segments in it give the memory that a lane would have
if it had read the whole epoch up to there with the current weights (decision 5 has the argument).
Nothing is trained, and dropout is off. A kind of memory without such a limit is refused.
"""

from data_pipeline.streams.segment_stream import SegmentStream
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError
from txl_dist.model.memory import memory_kind
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.training.resume_point import ResumePoint
from txl_dist.training.state import TrainState
from txl_dist.training.step import TrainStep


def context_segments(config: RunConfig) -> int:
    """Segments that determine the memory; 0 without a memory, or if no number of them does."""
    num_tokens = memory_kind(config.model).receptive_tokens(config.data.tgt_len)
    return (num_tokens or 0) // config.data.tgt_len


def segments_to_replay(config: RunConfig, point: ResumePoint, state: TrainState) -> int:
    """How many segments to replay before the first step after a resume; usually none.

    Raises ConfigError if the memory would have to be replayed, and no number of segments is enough.
    """
    phase = state.phases[-1]
    # After a change of the corpora, or at the start of an epoch, lanes start without a memory.
    is_cold = phase.position == state.position and not phase.unread
    if is_cold or point.has_memory_for(config):
        return 0
    if memory_kind(config.model).receptive_tokens(config.data.tgt_len) is None:
        raise ConfigError(
            f"the lanes of {point.path} cannot be given to other lanes: model.memory="
            f"{config.model.memory} may depend on any earlier token, so it cannot be read again. "
            "Keep data.num_lanes, or start a new run"
        )
    return context_segments(config)


def replay(step: TrainStep, stream: SegmentStream, num_segments: int, *, config: RunConfig) -> None:
    """Fill the memory of this rank's lanes as it is before the stream's position. Collective."""
    world = step.world
    world.activity.name = f"replay of {num_segments} segments"
    fault_point("replay")
    segments = stream.segments_before(num_segments)
    with step.engine.whole_model() as model:
        model.eval()  # or it would draw dropout masks
        for segment in segments:
            step.replay(segment, model, config.precision)
        model.train()
