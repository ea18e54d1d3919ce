"""The state of a run after a step: a pure function of the state before, the segment and the result.

A step that was skipped or rejected counts as a step, but not as an update.
"""

from typing import Any

from data_pipeline.streams.segments import Segment
from txl_dist.config.training_config import DivergenceConfig
from txl_dist.evaluation.loss_sums import LossSums
from txl_dist.training.state import LastUpdate, TrainState
from txl_dist.training.step import StepResult


def after_step(
    state: TrainState, segment: Segment, result: StepResult, config: DivergenceConfig
) -> TrainState:
    """The state after the step that has read `segment`."""
    changes = _updated(state, result, config) if result.is_update else _skipped(state, segment)
    position = {"step": state.step + 1, "position": segment.next_position, "score": None}
    return state.model_copy(update={**position, **changes})


def _updated(state: TrainState, result: StepResult, config: DivergenceConfig) -> dict[str, Any]:
    unreported = LossSums(*state.unreported) + result.sums
    divergence = state.divergence.with_accepted(
        config, sums=result.sums, gradient_norm=result.gradient_norm
    )
    return {
        "tokens": state.tokens + result.sums.num_tokens,
        "unreported": (unreported.nats, unreported.num_tokens, unreported.num_bytes),
        "unreported_steps": state.unreported_steps + 1,
        "last_update": LastUpdate(
            step=state.step + 1,
            gradient_norm=result.gradient_norm,
            memory_valid=result.memory_valid,
        ),
        "divergence": divergence,
    }


def _skipped(state: TrainState, segment: Segment) -> dict[str, Any]:
    # The memory is that of the tokens before this segment: the next one must not attend to it.
    return {
        "skipped_steps": state.skipped_steps + 1,
        "contiguous_from": segment.next_position,
    }
