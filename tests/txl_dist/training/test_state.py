"""TrainState is read from a checkpoint's manifest, or refused with the wrong entry's name.

Its divergence state judges steps: what is a spike, and which steps have updated the weights.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.txl_dist.checkpoint.saving import BEST, save
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.config.training_config import DivergenceConfig
from txl_dist.errors import CheckpointError
from txl_dist.evaluation.scores import LossSums
from txl_dist.training.state import DivergenceState, TrainState, load_state


def test_the_state_of_a_checkpoint_equals_the_saved_one(tmp_path: Path) -> None:
    path = save(tmp_path, step=3)
    expected = TrainState(step=3, position=12, best=BEST)
    assert load_state(path, load_checkpoint_manifest(path)) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": -1}, "state.position: Input should be greater than or equal to 0"),
        ({"tokens": "7"}, "state.tokens: Input should be a valid integer"),
        ({"learning_rate": 0.1}, "state.learning_rate: Extra inputs are not permitted"),
        ({"unreported": [float("nan"), 0, 0]}, "state.unreported.0: Input should be a finite"),
    ],
)
def test_an_invalid_state_is_a_checkpoint_error(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = save(tmp_path, step=3)
    manifest = load_checkpoint_manifest(path)
    damaged = manifest.model_copy(update={"state": manifest.state | change})
    with pytest.raises(CheckpointError) as caught:
        load_state(path, damaged)
    assert message in str(caught.value)
    assert str(path / "manifest.json") in str(caught.value)


@pytest.mark.parametrize(
    ("change", "improves"),
    [
        ({"nats": 2.4}, True),
        ({"nats": 2.6}, False),
        ({"nats": 2.6, "max_tokens": 5}, True),
        ({"nats": 2.6, "split": "test"}, True),
        ({"nats": 2.6, "data_digest": "1" * 64}, True),
    ],
)
def test_only_scores_of_the_same_text_are_compared(change: dict[str, Any], improves: bool) -> None:
    assert (BEST.model_copy(update=change).gain_over(BEST) is not None) is improves
    assert BEST.gain_over(None) == 0


# --- divergence ---------------------------------------------------------------------------------


def judged(config: DivergenceConfig, losses: list[float], norms: list[float]) -> list[str | None]:
    """Whether each step was accepted; only accepted steps enter the window."""
    state, verdicts = DivergenceState(), []
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        sums = LossSums(nats=4 * loss, num_tokens=4)
        values = {"sums": sums, "gradient_norm": norm, "memory_valid": 0.0}
        verdicts.append(state.find_event(config, step=step, **values))
        if verdicts[-1] is None:
            state = state.with_accepted(config, **values)
    return verdicts


def spikes(values: list[float], **settings: Any) -> list[int]:
    """Steps that are events, with `values` as losses; the same with `values` as norms."""
    ones = [1.0] * len(values)
    of_loss = judged(DivergenceConfig(loss_spike=4, **settings), values, ones)
    of_norm = judged(DivergenceConfig(gradient_spike=4, **settings), ones, values)
    found = [[step for step, event in enumerate(v, start=1) if event] for v in (of_loss, of_norm)]
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_always_an_event(value: float) -> None:
    losses = judged(DivergenceConfig(), [1.0, value], [1.0, 1.0])
    assert losses[0] is None
    assert "the loss of step 2 is" in str(losses[1])
    norms = judged(DivergenceConfig(), [1.0, 1.0], [1.0, value])
    assert "the global gradient norm of step 2 is" in str(norms[1])


def test_without_thresholds_no_finite_value_is_an_event_and_nothing_is_kept() -> None:
    config, state = DivergenceConfig(), DivergenceState()
    assert judged(config, [1.0, 1e30, 1.0], [1.0, 1.0, 1e30]) == [None] * 3
    sums = LossSums(nats=3.0, num_tokens=1)
    assert accepted(state, config, sums) == state


def accepted(
    state: DivergenceState, config: DivergenceConfig, sums: LossSums, memory_valid: float = 0.0
) -> DivergenceState:
    return state.with_accepted(config, sums=sums, gradient_norm=1.0, memory_valid=memory_valid)


def test_a_window_is_empty_while_its_threshold_is_not_set() -> None:
    """When it is set again, old values would be no measure."""
    state, sums = DivergenceState(), LossSums(nats=3.0, num_tokens=1)
    for thresholds in ({"loss_spike": 4}, {"gradient_spike": 4}):
        state = accepted(state, DivergenceConfig(**thresholds), sums)
    assert (state.losses, state.gradient_norms, state.memory_valid) == ((), (1.0,), (0.0, 0.0))
    assert accepted(state, DivergenceConfig(), sums) == DivergenceState()


def test_a_step_that_reads_little_of_the_usual_memory_is_no_spike() -> None:
    """After a discarded step its loss is higher: discarding it, too, would never end."""
    config, state = DivergenceConfig(loss_spike=4, window_steps=5), DivergenceState()
    for _ in range(5):
        state = accepted(state, config, LossSums(nats=1.0, num_tokens=1), memory_valid=0.8)
    cold, half = (
        state.find_event(
            config,
            step=6,
            sums=LossSums(nats=1.2, num_tokens=1),
            gradient_norm=1.0,
            memory_valid=share,
        )
        for share in (0.39, 0.4)
    )
    assert cold is None
    assert "a spike above" in str(half)


def test_a_spike_is_above_median_and_robust_deviations_of_the_window() -> None:
    window = [3.0, 3.1, 2.9, 3.2, 2.8]  # median 3, MAD 0.1
    limit = 3.0 + 4 * 1.4826 * 0.1
    assert spikes([*window, limit - 1e-6], window_steps=5) == []
    assert spikes([*window, limit + 1e-6], window_steps=5) == [6]
    assert spikes([*window, 0.1], window_steps=5) == []  # falling is not divergence


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        # Equal values have a deviation of one percent.
        ([2.0] * 5 + [2.07], []),
        ([2.0] * 5 + [2.09], [6]),
        # Nothing is a spike before the window is full.
        ([1.0] * 4 + [9.0], []),
        ([1.0] * 5 + [9.0], [6]),
        # A rejected value does not raise the limit.
        ([1.0] * 5 + [9.0] * 7, [*range(6, 13)]),
    ],
)
def test_which_steps_are_spikes(values: list[float], steps: list[int]) -> None:
    assert spikes(values, window_steps=5) == steps


def test_the_window_follows_a_slow_change() -> None:
    values = [float(value) for value in np.linspace(3, 30, 500)]
    assert spikes(values, window_steps=5) == []
    state, config = DivergenceState(), DivergenceConfig(loss_spike=4, window_steps=5)
    for value in values:
        state = accepted(state, config, LossSums(nats=value, num_tokens=1))
    assert state.losses == tuple(values[-5:])


def test_a_step_without_targets_has_no_loss_to_judge() -> None:
    config = DivergenceConfig(loss_spike=4, window_steps=5)
    state = DivergenceState(losses=(1.0,) * 5)
    values = {"sums": LossSums(), "gradient_norm": 0.0, "memory_valid": 0.0}
    assert state.find_event(config, step=6, **values) is None
    assert state.with_accepted(config, **values).losses == state.losses


def test_events_outside_of_the_interval_do_not_count() -> None:
    state = DivergenceState()
    for step in (5, 9, 1005):
        state = state.with_event(step=step)
    assert state.event_steps == (9, 1005)


def test_the_last_update_is_before_skipped_steps() -> None:
    state = DivergenceState(event_steps=(9,), skip_steps=(7, 8))
    assert [state.last_update(step) for step in (6, 7, 9, 10)] == [6, 6, 6, 10]


def test_the_state_survives_a_checkpoint_and_older_ones_have_none() -> None:
    divergence = DivergenceState(losses=(0.1,), event_steps=(3,), skip_steps=(2, 3))
    state = TrainState(step=4, skipped_steps=2, contiguous_from=9, divergence=divergence)
    assert TrainState.model_validate_json(state.model_dump_json()) == state
    old = TrainState.model_validate_json('{"step": 4, "position": 12}')
    assert (old.skipped_steps, old.contiguous_from, old.divergence) == (0, 0, DivergenceState())


def test_a_limit_of_events_that_no_run_can_reach_is_refused() -> None:
    with pytest.raises(ValueError, match="less than 1000"):
        DivergenceConfig(max_events=1000)
