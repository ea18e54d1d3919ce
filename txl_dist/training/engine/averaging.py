"""The average of the weights over steps, updated after every optimizer step.

`ema` is an exponential average. `asgd` is the mean of the weights of all steps since the first one,
as averaged SGD keeps it (Polyak & Juditsky 1992); the paper's Penn Treebank model averages its
weights (arXiv:1901.02860).
"""

from dataclasses import dataclass
from typing import Self

from txl_dist.config.optimizer_config import OptimizerConfig


@dataclass(frozen=True, slots=True)
class WeightAveraging:
    """How much the newest weights count in the average."""

    start_step: int
    ema_decay: float | None
    """None: all steps count the same."""

    @classmethod
    def of(cls, config: OptimizerConfig) -> Self | None:
        """None if the config has no averaging."""
        if config.averaging is None:
            return None
        decay = config.ema_decay if config.averaging == "ema" else None
        return cls(config.averaging_start_step, decay)

    def weight_at(self, step: int) -> float:
        """Weight of the weights after step `step`; until the start the average is a copy."""
        if step <= self.start_step:
            return 1.0
        return 1 / (step - self.start_step + 1) if self.ema_decay is None else 1 - self.ema_decay


def describe_average(config: OptimizerConfig) -> str:
    """`average of the weights (ema, decay 0.999, from step 1)`."""
    decay = f", decay {config.ema_decay:g}" if config.averaging == "ema" else ""
    start = config.averaging_start_step
    return f"average of the weights ({config.averaging}{decay}, from step {start})"
