"""RMS norm, alone and together with the rotation of queries and keys.

    y = x / sqrt(mean(x^2) + EPSILON)        over the last dimension

Source: Zhang & Sennrich 2019, arXiv:1910.07467, equation 4, without gains. Queries and keys: Henry
et al. 2020, arXiv:2010.04245.
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

EPSILON = 1e-6
"""Keeps the norm of a vector of zeros finite."""


def new_norm(config: ModelConfig) -> nn.Module:
    """A norm of the config's kind over D."""
    norm: nn.Module = resolve_name(NORMS[config.norm])(config.d_model)
    return norm


class RmsNorm(nn.Module):
    """forward(x) -> x with a root mean square of 1 over the last dimension, of size `width`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return normalise(x)

    def extra_repr(self) -> str:
        return str(self.width)


def normalise(
    x: Tensor, scale: float = 1.0, rotary_SK: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """RMS norm over the last dimension, times `scale`, then rotated if positions are given.

    Sums are at least fp32, the result has the dtype of `x`. One autograd node: autograd through the
    single operations would keep four tensors of this size for backward instead of one.
    """
    result: Tensor = _Normalise.apply(x, scale, *(rotary_SK or (None, None)))
    return result


class _Normalise(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: float, cos_SK: Tensor | None, sin_SK: Tensor | None
    ) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = inverse.square_().div_(x.shape[-1]).add_(EPSILON).rsqrt_()
        y = wide * (inverse * scale)
        if cos_SK is not None and sin_SK is not None:
            y = rotated(y, cos_SK, sin_SK)
        ctx.save_for_backward(x, inverse, cos_SK, sin_SK)
        ctx.scale = scale
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse, cos_SK, sin_SK = ctx.saved_tensors
        wide, d_y = x.to(inverse.dtype), gradients[0].to(inverse.dtype)
        if cos_SK is not None:
            d_y = rotated(d_y, cos_SK, -sin_SK)
        # d_x = scale * inverse * (d_y - y mean(d_y y)) with y = x * inverse
        y = wide * inverse
        mean = (d_y * y).mean(-1, keepdim=True)
        d_x = torch.addcmul(d_y, y, mean, value=-1).mul_(inverse * ctx.scale)
        return d_x.to(x.dtype), None, None, None
