"""The length of a run and of its warm-up in steps, whatever unit the config gives them in.

Resolved once, when the data is open; all other code reads `RunConfig.num_steps` and
`OptimizerConfig.warmup_steps`. A checkpoint stores the resolved config, so that a resume compares
steps; RUN/config.yaml keeps what the user wrote.
"""

import math
from fractions import Fraction

from data_pipeline.streams.lanes import LanePlan
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError


def resolve_duration(config: RunConfig, plan: LanePlan) -> RunConfig:
    """A copy of `config` in which `training.num_steps` is set.

    `plan` has the lanes and epochs of the run's data. Raises ConfigError if
    the warm-up or the decay does not fit into the run.
    """
    training, optimizer = config.training, config.optimizer
    tokens_per_step = plan.num_lanes * plan.tgt_len
    num_steps = training.num_steps
    if training.num_tokens is not None:
        num_steps = -(-training.num_tokens // tokens_per_step)
    elif training.num_epochs is not None:
        # Of one lane: the last tokens of an epoch, fewer than lanes, are not read.
        # As the decimal number that was written: 0.07 of 100 tokens are 7, not 7.000000000000001.
        lane_tokens = Fraction(str(training.num_epochs)) * plan.lane_tokens
        num_steps = max(1, math.ceil(lane_tokens / plan.tgt_len))
    assert num_steps is not None
    # Not validated again: num_steps may be set together with the setting that it was computed from.
    training = training.model_copy(update={"num_steps": num_steps})
    if problems := list(optimizer.problems_with(num_steps=num_steps)):
        raise ConfigError("\n  ".join(problems))
    return config.model_copy(update={"training": training})


def how_to_extend(config: RunConfig, *, num_steps: int) -> str:
    """The options of `txl train` with which a finished run of `num_steps` is trained twice as long.

    `config` is the resolved config.
    """
    training, setting = config.training, f"training.num_steps={2 * num_steps}"
    if training.num_tokens is not None:
        setting = f"training.num_tokens={2 * training.num_tokens}"
    elif training.num_epochs is not None:
        setting = f"training.num_epochs={2 * training.num_epochs:g}"
    return f"{setting} --allow-change training.num_steps"
