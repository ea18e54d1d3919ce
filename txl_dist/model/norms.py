"""RMS norm, alone and together with the rotation of queries and keys.

    y = g x / sqrt(mean(x^2) + epsilon)        over the last dimension

Source: Zhang & Sennrich 2019, arXiv:1910.07467, equation 4. Queries and keys: Henry et al. 2020,
arXiv:2010.04245.
"""

from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from txl_dist.model.choices import NORMS
from txl_dist.model.config import ModelConfig
from txl_dist.model.encodings import rotated


def new_norm(config: ModelConfig) -> nn.Module:
    """A norm of the config's kind over D."""
    norm: nn.Module = resolve_name(NORMS[config.norm])(config.d_model, eps=config.norm_epsilon)
    return norm


class RmsNorm(nn.Module):
    """forward(x) -> x with a root mean square of 1 over the last dimension, times the gains [D]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor, *, gains_apart: bool = False) -> Any:
        """With `gains_apart` the norm without gains, and the gains.

        A linear map can multiply its weights by them: then their gradient follows from that of the
        weights, without a gradient of x.
        """
        if gains_apart:
            # A copy: ZeRO stage 3 takes the parameter away after this call.
            return normalise(x, None, self.eps), self.weight.clone()
        return normalise(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"


def normalise(
    x: Tensor,
    gain: Tensor | None,
    epsilon: float,
    rotary_SK: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """RMS norm over the last dimension, times the gains, then rotated if positions are given.

    Sums are at least fp32, the result has the dtype of `x`. One autograd node: autograd through the
    single operations would keep four tensors of this size for backward instead of one.
    """
    result: Tensor = _Normalise.apply(x, gain, epsilon, *(rotary_SK or (None, None)))
    return result


class _Normalise(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gain: Tensor | None,
        epsilon: float,
        cos_SK: Tensor | None,
        sin_SK: Tensor | None,
    ) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = inverse.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        y = wide * inverse
        if gain is not None:
            y *= gain
        if cos_SK is not None and sin_SK is not None:
            y = rotated(y, cos_SK, sin_SK)
        ctx.save_for_backward(x, gain, inverse, cos_SK, sin_SK)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, inverse, cos_SK, sin_SK = ctx.saved_tensors
        d_x = d_gain = None
        d_y = gradients[0].to(inverse.dtype)
        if cos_SK is not None:
            d_y = rotated(d_y, cos_SK, -sin_SK)
        y = x.to(inverse.dtype) * inverse
        if gain is not None and ctx.needs_input_grad[1]:
            d_gain = (d_y * y).flatten(0, -2).sum(0).to(gain.dtype)
        if ctx.needs_input_grad[0]:
            # d_x = inverse * (g d_y - y mean(g d_y y)) with y before the gains
            d_y = d_y if gain is None else d_y * gain
            mean = (d_y * y).mean(-1, keepdim=True)
            d_x = torch.addcmul(d_y, y, mean, value=-1).mul_(inverse).to(x.dtype)
        return d_x, d_gain, None, None, None
