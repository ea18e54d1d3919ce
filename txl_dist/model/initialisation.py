"""The original's initialisation: normal weights, zero biases, norms around one.

Facts from the paper's training script: every matrix and the vectors u, v are normal(0, init_std),
the projections of tables normal(0, proj_init_std), norm gains normal(1, init_std), the rest 0.
Drawn from one generator in the parameters' order, so every rank starts alike without a broadcast.
"""

import torch
from torch import nn

from txl_dist.model.config import ModelConfig


def initialise(model: nn.Module, config: ModelConfig, *, seed: int) -> None:
    """Fill every parameter in place; the result depends on the config and `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if "projections." in name:
                parameter.normal_(0.0, config.proj_init_std, generator=generator)
            elif name.endswith("norm.weight"):
                parameter.normal_(1.0, config.init_std, generator=generator)
            elif name.endswith((".bias", "cluster_bias")):
                parameter.zero_()
            else:
                parameter.normal_(0.0, config.init_std, generator=generator)
