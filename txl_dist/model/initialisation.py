"""The initialisation of the paper's training script.

    matrices, u and v                          normal(0, init_std)
    projections of embedding and softmax       normal(0, proj_init_std)
    gains of LayerNorm                         normal(1, init_std)
    biases                                     0

One generator draws all parameters in their order, so every rank has the same weights without a
broadcast.
"""

import torch
from torch import nn

from txl_dist.model.config import ModelConfig


def initialise(model: nn.Module, config: ModelConfig, *, seed: int) -> None:
    """Fill all parameters in place, as a function of the config and `seed`."""
    # A separate generator on the CPU: the weights depend neither on global state nor on the device.
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
