"""One layer: attention and feed-forward, each with a norm and a residual.

    post-norm (the paper)    x = norm(x + f(x))
    pre-norm (pre_lnorm)     x = x + f(norm(x)), where attention also normalises the memory

Sources: those of each class.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from txl_dist.model.attention import Attention, SegmentContext, StackedLinear
from txl_dist.model.config import ModelConfig
from txl_dist.model.dropout import Dropout, DropoutMasks
from txl_dist.model.norms import RmsNorm, new_norm

# Shapes: B lanes, T segment tokens, N = B T, D d_model, I d_inner


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


class Layer(nn.Module):
    """forward(x_BTD, memory, context) -> the next layer's input [B, T, D].

    `memory` is what `SequenceState.past` returns; see `Attention`.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.pre_lnorm = config.pre_lnorm
        self.attention = Attention(config, layer)
        self.attention_norm = new_norm(config)
        self.attention_dropout = Dropout(config.dropout, layer=layer, place="attention")
        self.feed_forward = FeedForward(config, layer)
        self.feed_forward_norm = new_norm(config)
        self.feed_forward_dropout = Dropout(config.dropout, layer=layer, place="feed-forward")

    def forward(self, x_BTD: Tensor, memory: Any, context: SegmentContext) -> Tensor:
        masks = context.dropout_masks
        if self.pre_lnorm:
            norm = self.attention_norm
            # The memory holds inputs from before the norm; a cache holds keys computed after it.
            gain_D = None
            if isinstance(memory, Tensor) and isinstance(norm, RmsNorm):
                memory, gain_D = norm(memory, gains_apart=True)
            elif isinstance(memory, Tensor):
                memory = norm(memory)
            mixed_BTD = self.attention(norm(x_BTD), memory, context, gain_D)
            mixed_BTD = self.attention_dropout(mixed_BTD, masks)
            x_BTD = x_BTD + mixed_BTD
            out_BTD = self.feed_forward(self.feed_forward_norm(x_BTD), masks)
            return x_BTD + self.feed_forward_dropout(out_BTD, masks)
        mixed_BTD = self.attention_dropout(self.attention(x_BTD, memory, context), masks)
        x_BTD = self.attention_norm(x_BTD + mixed_BTD)
        out_BTD = self.feed_forward_dropout(self.feed_forward(x_BTD, masks), masks)
        out: Tensor = self.feed_forward_norm(x_BTD + out_BTD)
        return out


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
