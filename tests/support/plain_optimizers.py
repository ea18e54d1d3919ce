"""Optimizers as their papers write them, in float64 and without shared code, as oracles.

All have the settings of `test_loop.py`: betas 0.7 and 0.95, eps 1e-5, weight decay 0.3 of the
matrices, momentum 0.95 for Muon (no setting changes it).
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from txl_dist.model.transformer_xl import TransformerXL

# The test model has a plain softmax and no projections, so its matrices are the hidden ones.
HIDDEN = ("query", "key_value", "project", "out", "up", "down")
BETA1, BETA2, EPS, WEIGHT_DECAY, MOMENTUM = 0.7, 0.95, 1e-5, 0.3, 0.95


def plain_optimizer(name: str, model: TransformerXL) -> torch.optim.Optimizer:
    """The optimizer of that name; the learning rate of its groups is set before each step."""
    hidden, stacked, others = [], [], []
    for parameter_name, parameter in model.named_parameters():
        is_hidden = parameter_name.endswith(tuple(f".{part}.weight" for part in HIDDEN))
        is_stacked = parameter_name.endswith(".key_value.weight")  # keys above values
        (stacked if is_stacked else hidden if is_hidden else others).append(parameter)
    groups = [
        {"params": hidden, "weight_decay": WEIGHT_DECAY, "hidden": 1},
        {"params": stacked, "weight_decay": WEIGHT_DECAY, "hidden": 2},
        {"params": others, "weight_decay": 0.0, "hidden": 0},
    ]
    adam: dict[str, Any] = {"lr": 1.0, "betas": (BETA1, BETA2), "eps": EPS, "foreach": False}
    match name:
        case "adamw":
            return torch.optim.AdamW(groups, **adam)
        case "adam":
            return torch.optim.Adam(groups, **adam)
        case "lamb":
            return _Plain(groups, _lamb)
        case "muon":
            return _Plain(groups, _muon_or_adamw)
    raise ValueError(name)


class _Plain(torch.optim.Optimizer):
    def __init__(self, groups: list[dict[str, Any]], rule: Any) -> None:
        super().__init__(groups, {"lr": 1.0})
        self._rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                new = self._rule(parameter.double(), parameter.grad.double(), state, group)
                parameter.copy_(new)


def _adam_update(gradient: Tensor, state: dict[str, Any]) -> Tensor:
    state["m"] = BETA1 * state.get("m", 0) + (1 - BETA1) * gradient
    state["v"] = BETA2 * state.get("v", 0) + (1 - BETA2) * gradient**2
    m, v = state["m"] / (1 - BETA1 ** state["step"]), state["v"] / (1 - BETA2 ** state["step"])
    return m / (v.sqrt() + EPS)


def _lamb(weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    update = _adam_update(gradient, state) + group["weight_decay"] * weight
    norm, update_norm = float(weight.norm()), float(update.norm())
    ratio = norm / update_norm if norm and update_norm else 1.0
    return weight - group["lr"] * ratio * update


def _muon_or_adamw(
    weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> Tensor:
    decayed = weight * (1 - group["lr"] * group["weight_decay"])
    if not group["hidden"]:
        return decayed - group["lr"] * _adam_update(gradient, state)
    state["B"] = MOMENTUM * state.get("B", 0) + (1 - MOMENTUM) * gradient
    update = MOMENTUM * state["B"] + (1 - MOMENTUM) * gradient
    matrices = update.chunk(group["hidden"])
    factor = 0.2 * math.sqrt(max(matrices[0].shape))
    step = torch.cat([newton_schulz_by_svd(matrix) for matrix in matrices])
    return decayed - group["lr"] * factor * step


def newton_schulz_by_svd(matrix: Tensor) -> Tensor:
    """Five iterations of Muon's polynomial, applied to the singular values."""
    u, s, v = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return torch.from_numpy((u * s) @ v)
