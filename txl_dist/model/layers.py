"""One Transformer-XL layer: attention and feed-forward, each with its residual and its norm.

Post-norm is the paper's x = norm(x + f(x)); pre-norm is x = x + f(norm(x)), where the memory passes
the norm too. Source: arXiv:1901.02860, section 3.3.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from txl_dist.model.attention import Attention, SegmentContext
from txl_dist.model.config import ModelConfig
from txl_dist.model.dropout import Dropout, DropoutMasks
from txl_dist.model.kv_cache import LayerKVCache

# Shapes: B lanes, T segment tokens, N = B T, M memory tokens, D d_model, I d_inner


class FeedForward(nn.Module):
    """forward(x_BTD, draws) -> out_BTD, without the residual."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, config.d_inner)
        self.down = nn.Linear(config.d_inner, config.d_model)
        self.inner_dropout = Dropout(config.dropout, layer=layer, place="inner")

    def forward(self, x_BTD: Tensor, draws: DropoutMasks | None) -> Tensor:
        # Rows without lanes, for the projection of more dimensions is a view of another tensor.
        inner_NI = _InPlaceRelu.apply(self.up(x_BTD.flatten(0, 1)))
        inner_BTI = inner_NI.unflatten(0, x_BTD.shape[:2])
        return self.down(self.inner_dropout(inner_BTI, draws))


class _InPlaceRelu(Function):
    """ReLU of a projection that nobody else has, forwards and backwards in its own memory.

    So a hook on the projection sees its output after the ReLU, and may not ask for its gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.relu_())
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        (gradient,) = gradients  # made by the next product for this node alone
        return torch.ops.aten.threshold_backward.grad_input(gradient, y, 0, grad_input=gradient)


class Layer(nn.Module):
    """forward(x_BTD, past, around) -> the next layer's input, [B, T, D]; `past` as in attention."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.pre_lnorm = config.pre_lnorm
        self.attention = Attention(config, layer)
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention_dropout = Dropout(config.dropout, layer=layer, place="attention")
        self.feed_forward = FeedForward(config, layer)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.feed_forward_dropout = Dropout(config.dropout, layer=layer, place="feed-forward")

    def forward(self, x_BTD: Tensor, past: Tensor | LayerKVCache, around: SegmentContext) -> Tensor:
        draws = around.draws
        if self.pre_lnorm:
            norm = self.attention_norm
            past = norm(past) if isinstance(past, Tensor) else past
            mixed = self.attention(norm(x_BTD), past, around)
            x_BTD = x_BTD + self.attention_dropout(mixed, draws)
            mixed = self.feed_forward(self.feed_forward_norm(x_BTD), draws)
            return x_BTD + self.feed_forward_dropout(mixed, draws)
        mixed = self.attention(x_BTD, past, around)
        x_BTD = self.attention_norm(x_BTD + self.attention_dropout(mixed, draws))
        mixed = self.feed_forward(x_BTD, draws)
        return self.feed_forward_norm(x_BTD + self.feed_forward_dropout(mixed, draws))
