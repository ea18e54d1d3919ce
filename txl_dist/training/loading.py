"""Loads the checkpoint where a run resumes: weights, optimizer state, and the memory of the lanes.

A checkpoint's memory does not fit if the number of lanes has changed, or if it has become longer.
It is replayed then: the tokens before the position are read again, without scoring. The receptive
field of a token is finite, so the segments in it give the memory that a lane would have if it had
read the whole epoch up to there with the current weights (decision 5 has the argument). Nothing is
trained, and dropout is off. A kind of memory without such a limit is refused.
"""

import logging

from data_pipeline.errors import counted
from txl_dist.checkpoint.directory import reading
from txl_dist.checkpoint.reader import (
    check_optimizer_states,
    check_parameters,
    load_fragments,
    load_memory,
)
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError
from txl_dist.model.memory import memory_kind
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.training.batches import Batches
from txl_dist.training.resume import ResumePoint
from txl_dist.training.start import Start
from txl_dist.training.state import TrainState, phases_from
from txl_dist.training.step import TrainStep

log = logging.getLogger(__name__)


def resume_at(point: ResumePoint, start: Start, step: TrainStep, batches: Batches) -> TrainState:
    """Load weights, optimizer state and memory; returns the state of the run. Collective."""
    fault_point("resume")
    engine = step.engine
    # The configs are compatible; this detects changes in the code of the model.
    check_parameters(point.path, point.manifest, engine.shapes)
    check_optimizer_states(point.path, point.manifest, engine.optimizer_states)
    # At a fork, the other run may remove the checkpoint.
    with reading(point.path):
        load_fragments(point.path, point.manifest, engine.fragments_to_load())
        engine.finish_loading(num_steps=point.state.step - point.state.skipped_steps)
        if has_memory_for(start.config, point):
            step.load_memory(load_memory(point.path, point.manifest, step.lanes))
    state = in_phase_of(start, point.state)
    if num_segments := segments_to_replay(start.config, point, state):
        # The memory has no gap any more then.
        state = state.model_copy(update={"contiguous_from": 0})
        _replay(num_segments, state, start, step, batches)
    return state


def in_phase_of(start: Start, state: TrainState) -> TrainState:
    """The state with the data of this job as its last phase."""
    phases = phases_from(
        state.phases,
        start.data.phase,
        position=state.position,
        context_tokens=context_segments(start.config) * start.config.data.tgt_len,
    )
    return state.model_copy(update={"phases": phases})


def _replay(
    num_segments: int, state: TrainState, start: Start, step: TrainStep, batches: Batches
) -> None:
    """Fill the memory of this rank's lanes as it is before the position of `state`. Collective."""
    step.world.activity.name = f"replay of {counted(num_segments, 'segment')}"
    fault_point("replay")
    replayed = batches.before(state, num_segments=num_segments)
    with step.engine.whole_model() as model:
        model.eval()  # or it would draw dropout masks
        for batch in replayed:
            step.replay(batch, model, start.config.precision)
        model.train()
    num_tokens = num_segments * start.config.data.tgt_len
    log.info("memory | replayed %s tokens per lane, unscored", f"{num_tokens:,}")


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
