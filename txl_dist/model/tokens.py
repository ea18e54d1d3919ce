"""Token ids to vectors and back: the table at the input, the softmax at the output.

Without clusters for now; `cutoffs` and `div_val` will open theirs behind the same two calls.
Both ends may share the table (`tie_weight`) and, if `d_embed` differs from `d_model`, the
projection. Source: arXiv:1901.02860, section 4.1; weight tying: arXiv:1608.05859.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, linear

from txl_dist.model.config import ModelConfig

# Shapes: B lanes, T segment tokens, D d_model, E d_embed, V vocabulary

IGNORED = -1
"""Target of a position that is not scored."""


class TokenTable(nn.Module):
    """forward(token_BT) -> x_BTD, scaled by sqrt(d_model) as the paper's code does."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.embedding_width))
        self.projection = (
            nn.Parameter(torch.empty(config.d_model, config.embedding_width))
            if config.has_projection
            else None
        )
        self.scale = config.d_model**0.5

    def forward(self, token_BT: Tensor) -> Tensor:
        x = embedding(token_BT, self.weight)
        if self.projection is not None:
            x = linear(x, self.projection)
        return x * self.scale


class TokenSoftmax(nn.Module):
    """Scores the next token. Holds only what it does not share with the `TokenTable`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(config.vocab_size))
        width = config.embedding_width
        self.weight = (
            None if config.tie_weight else nn.Parameter(torch.empty(config.vocab_size, width))
        )
        self.projection = (
            nn.Parameter(torch.empty(config.d_model, width))
            if config.has_projection and not config.tie_projection
            else None
        )

    def logits(self, hidden_BTD: Tensor, table: TokenTable) -> Tensor:
        """Unnormalised log-probabilities [B, T, V]."""
        weight = table.weight if self.weight is None else self.weight
        projection = table.projection if self.projection is None else self.projection
        if projection is not None:
            hidden_BTD = linear(hidden_BTD, projection.t())
        return linear(hidden_BTD, weight, self.bias)

    def nats(self, hidden_BTD: Tensor, target_BT: Tensor, table: TokenTable) -> Tensor:
        """Negative log-likelihood [B, T] in nats, in token order; 0 where the target is IGNORED."""
        logits_NV = self.logits(hidden_BTD, table).flatten(0, 1)
        nats_N = cross_entropy(
            logits_NV, target_BT.flatten(), ignore_index=IGNORED, reduction="none"
        )
        return nats_N.view(target_BT.shape)
