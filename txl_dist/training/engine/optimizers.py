"""The optimizer of a config: torch's own, or one of the two in this package.

All keep a `step` count and the states that their parameter groups name, of the shape of the
parameter or of this rank's part of it, so that a checkpoint can store them by parameter and range.
"""

import torch

from txl_dist.config.optimizer_config import OptimizerConfig
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.training.engine.eager_optimizers import Adam, AdamW
from txl_dist.training.engine.lamb import Lamb
from txl_dist.training.engine.muon import Muon
from txl_dist.training.engine.parameter_groups import parameter_groups


def create_optimizer(model: TransformerXL, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer named `config.name`, with the parameter groups of `parameter_groups.py`."""
    groups = parameter_groups(model, config)
    lr, betas, eps = config.lr, (config.beta1, config.beta2), config.eps
    match config.name:
        # torch's Adam and AdamW: DeepSpeed's variants compile for about a minute at the first
        # start.
        case "adamw":
            return AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
        case "adam":
            return Adam(groups, lr=lr, betas=betas, eps=eps, fused=True)
        case "lamb":
            return Lamb(groups, lr=lr, betas=betas, eps=eps)
        case "muon":
            return Muon(groups, lr=lr, betas=betas, eps=eps)
