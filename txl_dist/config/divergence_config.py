"""The section `divergence`: what a run does when a step diverges."""

from typing import Literal, Self

from pydantic import Field, model_validator

from txl_dist.config.section import Section


class DivergenceConfig(Section):
    """Which steps count as divergence, and what follows.

    A loss or gradient norm that is NaN or infinite always counts. A spike counts if its threshold
    is set: a value above median + threshold * deviation of the last `window_steps` accepted steps.
    The deviation is 1.4826 * the median absolute deviation, which for normally distributed values
    is the standard deviation, and at least 1 % of the median. All ranks agree before the update.
    """

    policy: Literal["stop", "skip", "rollback"] = "stop"
    """`stop` ends the run with exit code 5. `skip` discards the update and continues with the next
    segment. `rollback` returns to the newest good checkpoint, and continues without this
    step and the last update before it."""
    loss_spike: float | None = Field(default=None, gt=0)
    """Threshold of the training loss, in deviations above the median, such as 10; null: none."""
    gradient_spike: float | None = Field(default=None, gt=0)
    """Threshold of the gradient norm before clipping, such as 20; null: none."""
    window_steps: int = Field(default=100, ge=5, le=10_000)
    """Accepted steps that a spike is compared with. With fewer steps, nothing is a spike."""
    max_events: int = Field(default=10, ge=1)
    """Events that `skip` and `rollback` tolerate within `max_events_interval_steps`; the next one
    ends the run with exit code 5."""
    max_events_interval_steps: int = Field(default=1000, ge=2)
    """Number of the latest steps in which events are counted."""

    @model_validator(mode="after")
    def _require_attainable_limit(self) -> Self:
        if self.max_events >= self.max_events_interval_steps:
            raise ValueError(
                f"max_events={self.max_events} is not below max_events_interval_steps="
                f"{self.max_events_interval_steps}, so a run that diverges in every step would "
                "never end; lower it"
            )
        return self
