"""The learning rate: a function of the step and the config alone."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from txl_dist.config.optimizer_config import OptimizerConfig
from txl_dist.training.schedule import lr_at

SCHEDULES = ["cosine", "constant"]


def rates(config: OptimizerConfig, num_steps: int) -> list[float]:
    """Of steps 1 to `num_steps`."""
    return [lr_at(step, config, num_steps=num_steps) for step in range(1, num_steps + 1)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_is_a_straight_line_from_0_to_lr(schedule: str) -> None:
    config = OptimizerConfig(lr=0.8, warmup_steps=4, schedule=schedule, min_lr=0.3)
    assert rates(config, 9)[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])


def test_without_warm_up_the_first_step_is_near_lr() -> None:
    assert lr_at(1, OptimizerConfig(lr=0.8), num_steps=1000) == pytest.approx(0.8, rel=1e-5)
    assert lr_at(1, OptimizerConfig(lr=0.8, schedule="constant"), num_steps=9) == 0.8


def test_a_constant_rate_stays() -> None:
    config = OptimizerConfig(lr=0.8, warmup_steps=2, schedule="constant", min_lr=0.1)
    assert set(rates(config, 9)[1:]) == {0.8}


def test_the_cosine_is_half_a_period_after_warm_up() -> None:
    config = OptimizerConfig(lr=0.8, warmup_steps=3, min_lr=0.2)
    expected = [0.5 + 0.3 * math.cos(math.pi * done / 8) for done in range(1, 9)]
    assert rates(config, 11)[3:] == pytest.approx(expected)
    assert lr_at(11, config, num_steps=11) == pytest.approx(0.2)


@settings(max_examples=100, deadline=None)
@given(
    num_steps=st.integers(1, 60),
    warmup=st.integers(0, 60),
    schedule=st.sampled_from(SCHEDULES),
    min_lr=st.sampled_from([0.0, 0.1, 0.8]),
)
def test_it_rises_to_lr_then_never_rises_again(
    num_steps: int, warmup: int, schedule: str, min_lr: float
) -> None:
    warmup = min(warmup, num_steps)
    config = OptimizerConfig(lr=0.8, warmup_steps=warmup, schedule=schedule, min_lr=min_lr)
    values = rates(config, num_steps)
    assert all(a < b for a, b in pairwise(values[:warmup]))
    assert all(a >= b - 1e-12 for a, b in pairwise(values[max(0, warmup - 1) :]))
    assert all(min_lr - 1e-12 <= rate <= 0.8 + 1e-12 for rate in values[warmup:])
