"""The length of a run in steps, and the learning rate as a pure function of the step.

The config gives lengths in steps, tokens or epochs. They are resolved once, when the data is open;
all other code reads `RunConfig.num_steps` and `OptimizerConfig.warmup_steps`. A checkpoint stores
the resolved config, so that a resume compares steps; RUN/config.yaml keeps what the user wrote. A
resume has no scheduler state to restore.

The warm-up is a line from 0 to `lr`, which step `warmup_steps` reaches.

`schedule_of_paper_code` gives the rates of the training script of the paper (arXiv:1901.02860),
which differ: `_rate_of_paper_code`, and docs/decisions/0021.
"""

import math
from fractions import Fraction

from data_pipeline.streams.lanes import LanePlan
from txl_dist.config.optimizer_config import OptimizerConfig
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError


def resolve_duration(config: RunConfig, plan: LanePlan) -> RunConfig:
    """A copy of `config` in which `training.num_steps` is set.

    `plan` has the lanes and epochs of the run's data. Raises ConfigError if
    the warm-up or the decay does not fit into the run.
    """
    training, optimizer = config.training, config.optimizer
    num_steps = training.num_steps
    if training.num_tokens is not None:
        num_steps = -(-training.num_tokens // config.data.tokens_per_step)
    elif training.num_epochs is not None:
        # Of one lane: the last tokens of an epoch, fewer than lanes, are not read.
        # As the decimal number that was written: 0.07 of 100 tokens are 7, not 7.000000000000001.
        lane_tokens = Fraction(str(training.num_epochs)) * plan.lane_tokens
        num_steps = max(1, math.ceil(lane_tokens / plan.tgt_len)) * plan.num_turns
    assert num_steps is not None
    # Not validated again: num_steps may be set together with the setting that it was computed from.
    training = training.model_copy(update={"num_steps": num_steps})
    if problems := list(optimizer.problems_with(num_steps=num_steps)):
        raise ConfigError("\n  ".join(problems))
    return config.model_copy(update={"training": training})


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
            start = warmup
            if config.schedule == "wsd":
                assert config.decay_steps is not None
                start = num_steps - config.decay_steps
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
