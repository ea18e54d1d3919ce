"""The learning rate: a function of the step and the config alone."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from txl_dist.config.training_config import OptimizerConfig
from txl_dist.training.step import lr_at

SCHEDULES: dict[str, dict[str, int]] = {
    "cosine": {}, "constant": {}, "linear": {}, "inverse_sqrt": {}, "wsd": {"decay_steps": 3},
}  # fmt: skip


def schedule_of(schedule: str, **settings: Any) -> OptimizerConfig:
    values = {"schedule": schedule, **SCHEDULES[schedule], **settings}
    return OptimizerConfig.model_validate(values)


def rates(config: OptimizerConfig, num_steps: int) -> list[float]:
    """Of steps 1 to `num_steps`."""
    return [lr_at(step, config, num_steps=num_steps) for step in range(1, num_steps + 1)]


RATES: list[tuple[str, dict[str, Any], list[float]]] = [
    # A straight line from 0 to lr in the warm-up, whatever follows.
    *((name, {"warmup_steps": 4}, [0.2, 0.4, 0.6, 0.8]) for name in SCHEDULES),
    ("constant", {"warmup_steps": 0}, [0.8, 0.8, 0.8]),
    ("constant", {"warmup_steps": 2, "min_lr": 0.1}, [0.4, 0.8, 0.8, 0.8]),
    ("linear", {"warmup_steps": 2}, [0.4, 0.8, 0.6, 0.4, 0.2]),
    ("wsd", {"warmup_steps": 2}, [0.4, 0.8, 0.8, 0.8, 0.6, 0.4, 0.2]),
    ("cosine", {"warmup_steps": 1}, [0.8, 0.65, 0.35, 0.2]),  # half a period: 60, 120, 180 degrees
    ("inverse_sqrt", {"warmup_steps": 4}, [0.2, 0.4, 0.6, *(1.6 / n**0.5 for n in range(4, 10))]),
    ("inverse_sqrt", {"warmup_steps": 0}, [0.8 / n**0.5 for n in range(1, 10)]),
]
"""Schedule, settings, and the first rates of a run of as many steps, or of 9 in a warm-up."""


@pytest.mark.parametrize(("schedule", "settings", "expected"), RATES)
def test_the_rates_of_a_short_run(
    schedule: str, settings: dict[str, Any], expected: list[float]
) -> None:
    config = schedule_of(schedule, **{"lr": 0.8, "min_lr": 0.2, **settings})
    num_steps = 9 if len(expected) == settings["warmup_steps"] else len(expected)
    assert rates(config, num_steps)[: len(expected)] == pytest.approx(expected)


@settings(max_examples=100, deadline=None)
@given(
    num_steps=st.integers(1, 60),
    warmup=st.integers(0, 60),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    min_lr=st.sampled_from([0.0, 0.1, 0.8]),
)
def test_it_rises_to_lr_then_never_rises_again(
    num_steps: int, warmup: int, schedule: str, min_lr: float
) -> None:
    decay_steps = SCHEDULES[schedule].get("decay_steps", 0)
    num_steps += decay_steps
    warmup = min(warmup, num_steps - decay_steps)
    config = schedule_of(schedule, lr=0.8, warmup_steps=warmup, min_lr=min_lr)
    values = rates(config, num_steps)
    assert all(a < b for a, b in pairwise(values[:warmup]))
    assert all(a >= b - 1e-12 for a, b in pairwise(values[max(0, warmup - 1) :]))
    lowest = 0 if schedule == "inverse_sqrt" else min_lr
    assert all(lowest - 1e-12 <= rate <= 0.8 + 1e-12 for rate in values[warmup:])
    if schedule in ("cosine", "linear", "wsd") and warmup < num_steps:
        assert values[-1] == pytest.approx(min_lr)


# --- the training script of the paper -----------------------------------------------------------


def script_rates(
    scheduler: str, *, lr: float, warmup: int, num_steps: int, min_lr: float
) -> list[float]:
    """Rates at which the script updates, by its order of events with torch's own schedulers.

    Update, count, then `lr * count / warmup` while the count is below the warm-up, otherwise
    `scheduler.step(count)` (for `constant`, nothing).
    """
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    schedulers = {
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, num_steps, eta_min=min_lr
        ),
        "inverse_sqrt": lambda: torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda n: 1.0 if n == warmup == 0 else n**-0.5 if n > warmup else n / warmup**1.5,
        ),
        "constant": lambda: None,
    }
    torch_scheduler = schedulers[scheduler]()
    (group,) = optimizer.param_groups
    of_updates = [group["lr"]]
    for count in range(1, num_steps):
        if scheduler != "inverse_sqrt" and count < warmup:
            group["lr"] = lr * count / warmup
        elif torch_scheduler is not None:
            torch_scheduler.step(count)
        of_updates.append(group["lr"])
    return of_updates


@pytest.mark.filterwarnings("ignore::UserWarning")  # the epoch argument is deprecated, and exact
@pytest.mark.parametrize("schedule", ["cosine", "inverse_sqrt", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 2, 5, 12])
def test_every_rate_of_a_short_run_is_that_of_the_paper_s_script(
    schedule: str, warmup: int
) -> None:
    config = schedule_of(
        schedule, lr=0.8, warmup_steps=warmup, min_lr=0.1, schedule_of_paper_code=True
    )
    expected = script_rates(schedule, lr=0.8, warmup=warmup, num_steps=12, min_lr=0.1)
    assert rates(config, 12) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "wsd"}, "needs decay_steps"),
        ({"decay_steps": 3}, "has no effect with schedule=cosine"),
        ({"schedule": "linear", "schedule_of_paper_code": True}, "not in the paper's code"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig.model_validate(settings)
