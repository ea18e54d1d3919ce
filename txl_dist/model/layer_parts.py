"""The parts of a layer other than attention: norms and the feed-forward.

RMS norm, alone and together with the rotation of queries and keys:

    y = g x / sqrt(mean(x^2) + epsilon)        over the last dimension

Source: Zhang & Sennrich 2019, arXiv:1910.07467, equation 4. Queries and keys: Henry et al. 2020,
arXiv:2010.04245.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, silu

from txl_dist.model.config import ModelConfig
from txl_dist.model.dropout import Dropout, DropoutMasks
from txl_dist.model.encodings import rotated

# Shapes: B lanes, T segment tokens, N = B T, D d_model, I d_inner


def new_norm(config: ModelConfig) -> nn.Module:
    """A norm of the config's kind over D."""
    kind = RmsNorm if config.norm == "rmsnorm" else LayerNorm
    return kind(config.d_model, eps=config.norm_epsilon)


class LayerNorm(nn.LayerNorm):
    """forward(x) -> the norm in the dtype of `x`, for which autocast would give fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)


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


class StackedLinear(nn.Linear):
    """`nn.Linear` of `num_stacked` maps of the same input, computed as one product.

    The output is theirs side by side. Optimizers that treat a matrix as a whole, such as Muon, have
    to know: the best update of two matrices is not that of both as one.
    """

    def __init__(
        self, in_features: int, out_features: int, *, num_stacked: int, bias: bool = False
    ) -> None:
        super().__init__(in_features, num_stacked * out_features, bias=bias)
        self.num_stacked = num_stacked

    def forward(self, x: Tensor, gain_D: Tensor | None = None) -> Tensor:
        """The maps of x, or of x times `gain_D` [in_features] without a product of that size."""
        weight = self.weight if gain_D is None else self.weight * gain_D
        return linear(x, weight, self.bias)


class FeedForward(nn.Module):
    """forward(x_BTD, dropout_masks) -> out_BTD, without the residual.

    relu      down(relu(up(x)))
    relu2     down(relu(up(x))^2)                   So et al. 2021, arXiv:2109.08668
    swiglu    down(silu(a) * b), [a ; b] = up(x)    Shazeer 2020, arXiv:2002.05202
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.activation = config.feed_forward
        self.up = StackedLinear(
            config.d_model,
            config.d_inner,
            num_stacked=2 if self.activation == "swiglu" else 1,
            bias=config.biases,
        )
        self.down = nn.Linear(config.d_inner, config.d_model, bias=config.biases)
        self.inner_dropout = Dropout(config.dropout, layer=layer, place="inner")

    def forward(self, x_BTD: Tensor, dropout_masks: DropoutMasks | None) -> Tensor:
        # Flatten to 2-D: nn.Linear on 3-D input returns a view, which the in-place ReLU would
        # force autograd to copy.
        x_NI, lanes_and_tokens = self.up(x_BTD.flatten(0, 1)), x_BTD.shape[:2]
        if self.activation == "relu":
            x_BTI = x_NI.unflatten(0, lanes_and_tokens)
            inner_BTI = self.inner_dropout.of_relu(x_BTI, dropout_masks)
            if inner_BTI is not None:
                return self.down(inner_BTI)
        inner_BTI = self.activate(x_NI).unflatten(0, lanes_and_tokens)
        return self.down(self.inner_dropout(inner_BTI, dropout_masks))

    def activate(self, x_NI: Tensor) -> Tensor:
        """The activation of `up`'s result, which it may overwrite."""
        if self.activation == "swiglu":
            gate_NI, value_NI = x_NI.chunk(2, dim=-1)
            return silu(gate_NI) * value_NI
        x_NI = in_place_relu(x_NI)
        return x_NI.square() if self.activation == "relu2" else x_NI


def in_place_relu(x: Tensor) -> Tensor:
    """ReLU that overwrites `x`, and in backward the gradient of its output.

    `x` must be the output of a product that nothing else reads. A forward hook on that product sees
    the values after the ReLU, and must not use its gradient.
    """
    return _InPlaceRelu.apply(x)


class _InPlaceRelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.relu_())
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        (gradient,) = gradients  # safe to overwrite: the next product computed it for this node
        return torch.ops.aten.threshold_backward.grad_input(gradient, y, 0, grad_input=gradient)
