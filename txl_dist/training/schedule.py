"""The learning rate as a pure function of the step: a resume has no scheduler state to restore.

Linear warm-up from 0, then constant, or half a cosine period down to `min_lr` at the last step, as
in the training script of the paper (arXiv:1901.02860).
"""

import math

from txl_dist.config.optimizer_config import OptimizerConfig


def lr_at(step: int, config: OptimizerConfig, *, num_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 1."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.min_lr + (config.lr - config.min_lr) * cosine
