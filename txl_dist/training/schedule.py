"""The learning rate as a pure function of the step. A resume has no scheduler state to restore.

The warm-up is a line from 0 to `lr`, which step `warmup_steps` reaches.

`schedule_of_paper_code` gives the rates of the training script of the paper (arXiv:1901.02860),
which differ: `_rate_of_paper_code`, and docs/decisions/0021.
"""

import math

from txl_dist.config.training_config import OptimizerConfig


def lr_at(step: int, config: OptimizerConfig, *, num_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 1."""
    if config.schedule_of_paper_code:
        return _rate_of_paper_code(step - 1, config, num_steps=num_steps)
    lr, min_lr, warmup = config.lr, config.min_lr, config.warmup_steps
    if step <= warmup:
        return lr * step / warmup
    match config.schedule:
        case "constant":
            return lr
        case "inverse_sqrt":
            return lr * math.sqrt(max(1, warmup) / step)
        case "cosine":
            progress = (step - warmup) / max(1, num_steps - warmup)
            cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
            return min_lr + (lr - min_lr) * cosine
        case "linear" | "wsd":
            start = warmup if config.decay_steps is None else num_steps - config.decay_steps
            progress = (step - start) / max(1, num_steps - start)
            return lr + (min_lr - lr) * min(1.0, max(0.0, progress))


def _rate_of_paper_code(done: int, config: OptimizerConfig, *, num_steps: int) -> float:
    """Rate of the update after `done` steps. The script sets a new rate after each update.

    So the first update has the initial rate: 0 for `inverse_sqrt` with a warm-up, otherwise `lr`.
    """
    lr, warmup = config.lr, config.warmup_steps
    if config.schedule == "inverse_sqrt":
        return lr * done / warmup**1.5 if done < warmup else lr / math.sqrt(max(1, done))
    if 0 < done < warmup:
        return lr * done / warmup
    if config.schedule == "constant":
        # The script sets no rate after the warm-up: the last one of the warm-up stays.
        return lr * (warmup - 1) / warmup if done and warmup > 1 else lr
    cosine = 0.5 * (1 + math.cos(math.pi * done / num_steps))
    return config.min_lr + (lr - config.min_lr) * cosine
