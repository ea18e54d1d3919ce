"""One Transformer-XL layer: attention and feed-forward, each with its residual and its norm.

Post-norm is the paper's x = norm(x + f(x)); pre-norm is x = x + f(norm(x)), where the memory passes
the norm too. Source: arXiv:1901.02860, section 3.3.
"""

import torch
from torch import Tensor, nn

from txl_dist.model.attention import Attention, Surroundings
from txl_dist.model.config import ModelConfig
from txl_dist.model.dropout import Draws, Dropout
from txl_dist.model.inference import LayerState

# Shapes: B lanes, T segment tokens, M memory tokens, S = M + T keys, D d_model


class FeedForward(nn.Module):
    """forward(x_BTD, draws) -> out_BTD, without the residual."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, config.d_inner)
        self.down = nn.Linear(config.d_inner, config.d_model)
        self.inner_dropout = Dropout(config.dropout, layer=layer, place="inner")

    def forward(self, x_BTD: Tensor, draws: Draws | None) -> Tensor:
        return self.down(self.inner_dropout(torch.relu(self.up(x_BTD)), draws))


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

    def forward(self, x_BTD: Tensor, past: Tensor | LayerState, around: Surroundings) -> Tensor:
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
