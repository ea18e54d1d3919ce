"""Replay: fills the memory of lanes by reading the tokens before them again, without scoring.

A checkpoint's memory does not fit if the number of lanes has changed, or if `mem_len` has grown.
The receptive field of a token is finite: n_layer * ceil(mem_len / tgt_len) whole segments before
the next one give the memory that a lane would have if it had read the whole epoch up to there with
the current weights (decision 5 has the argument). Nothing is trained, and dropout is off.
"""

import torch

from data_pipeline.streams.segment_stream import SegmentStream
from txl_dist.config.run_config import RunConfig
from txl_dist.runtime.device import autocast
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.training.resume_point import ResumePoint
from txl_dist.training.state import TrainState
from txl_dist.training.step import TrainStep


def context_segments(config: RunConfig) -> int:
    """Segments before a token that determine the memory; 0 for a model without memory."""
    model = config.model
    return model.n_layer * -(-model.mem_len // config.data.tgt_len)


def segments_to_replay(config: RunConfig, point: ResumePoint, state: TrainState) -> int:
    """How many segments to replay before the first step after a resume; usually none."""
    phase = state.phases[-1]
    # After a change of the corpora, or at the start of an epoch, lanes start without a memory.
    is_cold = phase.position == state.position and not phase.unread
    return 0 if is_cold or point.has_memory_for(config) else context_segments(config)


def replay(step: TrainStep, stream: SegmentStream, num_segments: int, *, config: RunConfig) -> None:
    """Fill the memory of this rank's lanes as it is before the stream's position. Collective."""
    world = step.world
    world.activity.name = f"replay of {num_segments} segments"
    fault_point("replay")
    segments = stream.segments_before(num_segments)
    with step.engine.whole_model() as model, torch.no_grad():
        model.eval()  # or it would draw dropout masks
        for segment in segments:
            with autocast(config.precision, world.device):
                step.replay(segment, model)
        model.train()
