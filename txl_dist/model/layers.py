"""One Transformer-XL layer: attention and feed-forward, each with a residual and a LayerNorm.

    post-norm (the paper)    x = norm(x + f(x))
    pre-norm (pre_lnorm)     x = x + f(norm(x)), where attention also normalises the memory

Source: Dai et al. 2019, arXiv:1901.02860, section 3.3.
"""

from torch import Tensor, nn

from txl_dist.model.attention import Attention, SegmentContext
from txl_dist.model.autograd_functions import in_place_relu
from txl_dist.model.config import ModelConfig
from txl_dist.model.dropout import Dropout, DropoutMasks
from txl_dist.model.kv_cache import LayerKVCache

# Shapes: B lanes, T segment tokens, N = B T, D d_model, I d_inner


class FeedForward(nn.Module):
    """forward(x_BTD, dropout_masks) -> out_BTD, without the residual."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, config.d_inner)
        self.down = nn.Linear(config.d_inner, config.d_model)
        self.inner_dropout = Dropout(config.dropout, layer=layer, place="inner")

    def forward(self, x_BTD: Tensor, dropout_masks: DropoutMasks | None) -> Tensor:
        # Flatten to 2-D: nn.Linear on 3-D input returns a view, which the in-place ReLU would
        # force autograd to copy.
        inner_NI = in_place_relu(self.up(x_BTD.flatten(0, 1)))
        inner_BTI = inner_NI.unflatten(0, x_BTD.shape[:2])
        return self.down(self.inner_dropout(inner_BTI, dropout_masks))


class Layer(nn.Module):
    """forward(x_BTD, memory, context) -> the next layer's input [B, T, D]; see `Attention`."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.pre_lnorm = config.pre_lnorm
        self.attention = Attention(config, layer)
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention_dropout = Dropout(config.dropout, layer=layer, place="attention")
        self.feed_forward = FeedForward(config, layer)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.feed_forward_dropout = Dropout(config.dropout, layer=layer, place="feed-forward")

    def forward(
        self, x_BTD: Tensor, memory: Tensor | LayerKVCache, context: SegmentContext
    ) -> Tensor:
        masks = context.dropout_masks
        if self.pre_lnorm:
            norm = self.attention_norm
            # The memory holds inputs from before the norm; a cache holds keys computed after it.
            memory = norm(memory) if isinstance(memory, Tensor) else memory
            mixed_BTD = self.attention(norm(x_BTD), memory, context)
            x_BTD = x_BTD + self.attention_dropout(mixed_BTD, masks)
            out_BTD = self.feed_forward(self.feed_forward_norm(x_BTD), masks)
            return x_BTD + self.feed_forward_dropout(out_BTD, masks)
        mixed_BTD = self.attention(x_BTD, memory, context)
        x_BTD = self.attention_norm(x_BTD + self.attention_dropout(mixed_BTD, masks))
        out_BTD = self.feed_forward(x_BTD, masks)
        return self.feed_forward_norm(x_BTD + self.feed_forward_dropout(out_BTD, masks))
