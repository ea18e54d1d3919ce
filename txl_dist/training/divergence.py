"""Decides whether a step has diverged. Pure: numbers in, a description or None out.

The inputs are sums and norms over all ranks and the state is the same on every rank, so all ranks
decide the same without a further collective, before any of them updates its weights.
`recovery.py` acts on the decision.
"""

import math
from typing import Self

import numpy as np

from data_pipeline.system.strict import StrictModel
from txl_dist.checkpoint.manifest import Count
from txl_dist.config.training_config import EVENT_STEPS, DivergenceConfig
from txl_dist.evaluation.scores import LossSums

MIN_RELATIVE_DEVIATION = 0.01
"""Smallest deviation, relative to the median: a window of equal losses must not make every small
change a spike."""


class DivergenceState(StrictModel):
    """State that the divergence check and the response to events need; part of TrainState."""

    losses: tuple[float, ...] = ()
    """Nats per token of the last accepted steps; empty unless `loss_spike` is set."""
    gradient_norms: tuple[float, ...] = ()
    """Gradient norms of the last accepted steps; empty unless `gradient_spike` is set."""
    event_steps: tuple[Count, ...] = ()
    """Steps of the latest events, in the order in which they happened."""
    skip_steps: tuple[Count, ...] = ()
    """Steps that a rollback has excluded: no rank computes them, now or after a resume."""
    num_rollbacks: Count = 0

    def find_event(
        self, config: DivergenceConfig, *, step: int, sums: LossSums, gradient_norm: float
    ) -> str | None:
        """Why step number `step` has diverged; None if it may update the weights."""
        if not math.isfinite(sums.nats):
            return f"the loss of step {step} is {sums.nats}"
        if not math.isfinite(gradient_norm):
            return f"the global gradient norm of step {step} is {gradient_norm}"
        if sums.num_tokens:  # a segment of one token has no target
            limit = _limit(self.losses, config.loss_spike, config.window_steps)
            if sums.nats_per_token > limit:
                return (
                    f"the loss of step {step} is {sums.nats_per_token:.6g}, a spike above "
                    f"{limit:.6g} (divergence.loss_spike={config.loss_spike:g})"
                )
        limit = _limit(self.gradient_norms, config.gradient_spike, config.window_steps)
        if gradient_norm > limit:
            return (
                f"the global gradient norm of step {step} is {gradient_norm:.6g}, a spike above "
                f"{limit:.6g} (divergence.gradient_spike={config.gradient_spike:g})"
            )
        return None

    def with_accepted(
        self, config: DivergenceConfig, *, sums: LossSums, gradient_norm: float
    ) -> Self:
        """The state after an accepted step."""
        changes = {}
        if config.loss_spike is not None and sums.num_tokens:
            losses = (*self.losses, sums.nats_per_token)
            changes["losses"] = losses[-config.window_steps :]
        if config.gradient_spike is not None:
            norms = (*self.gradient_norms, gradient_norm)
            changes["gradient_norms"] = norms[-config.window_steps :]
        return self.model_copy(update=changes) if changes else self

    def with_event(self, *, step: int) -> Self:
        """The state after an event; those before the last EVENT_STEPS are dropped."""
        recent = tuple(other for other in self.event_steps if other > step - EVENT_STEPS)
        return self.model_copy(update={"event_steps": (*recent, step)})

    def last_update(self, step: int) -> int:
        """The last step up to `step` that updated the weights."""
        # Events of step numbers that were trained again after a rollback are in `skip_steps` too.
        without_update = {*self.event_steps, *self.skip_steps}
        while step in without_update:
            step -= 1
        return step


def _limit(window: tuple[float, ...], threshold: float | None, window_steps: int) -> float:
    """The largest value that is no spike; infinity without a threshold or a full window.

    median + threshold * max(1.4826 * MAD, 1 % of the median). MAD is the median absolute deviation;
    1.4826 MAD is the standard deviation of a normal distribution. Unlike mean and standard
    deviation, median and MAD do not change much when a few values of the window are large.
    """
    if threshold is None or len(window) < window_steps:
        return math.inf
    values = np.asarray(window[-window_steps:])
    median = float(np.median(values))
    deviation = 1.4826 * float(np.median(np.abs(values - median)))
    return median + threshold * max(deviation, MIN_RELATIVE_DEVIATION * abs(median))
