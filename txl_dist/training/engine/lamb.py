"""LAMB: Adam whose step is scaled, per parameter, to the norm of the parameter.

    m, v      Adam's running means with their bias corrections
    update    m / (sqrt(v) + eps) + weight_decay * w
    w         w - lr * (|w| / |update|) * update         the ratio is 1 if one of the norms is 0

The norms are those of whole parameters. ZeRO cuts parameters at the ends of ranks' partitions, so
LAMB runs at stage 0 only (config/optimizer_config.py refuses the others).

Source: You et al. 2020, arXiv:1904.00962, algorithm 2.
"""

import math
from typing import Any

import torch

from txl_dist.training.engine.eager_optimizers import EagerOptimizer


class Lamb(EagerOptimizer):
    """torch's interface; states exp_avg, exp_avg_sq and step."""

    def __init__(
        self,
        params: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        (beta1, beta2), state = group["betas"], self.state[parameter]
        state["step"] += 1
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1) / _correction(beta1, state["step"])
        squares = state["exp_avg_sq"].lerp_(gradient.square(), 1 - beta2)
        root = (squares / _correction(beta2, state["step"])).sqrt_().add_(group["eps"])
        update = mean.div_(root).add_(parameter, alpha=group["weight_decay"])
        norm, update_norm = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(update)
        # Not an `if`: reading the norms would wait for the device, once per parameter.
        has_ratio = (norm > 0) & (update_norm > 0)
        ratio = torch.where(has_ratio, norm / update_norm.clamp(min=1e-38), 1.0)
        parameter.sub_(update.mul_(ratio * group["lr"]))


def _correction(beta: float, step: torch.Tensor) -> torch.Tensor | float:
    """1 - beta^step."""
    # expm1: in fp32, 1 - 0.999^1 would have only four correct digits.
    return -torch.expm1(step * math.log(beta)) if beta else 1.0
