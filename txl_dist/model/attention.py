"""Attention over memory and segment with relative positions: an oracle and a fast form.

    A_ij = q_i . k_j  +  q_i . r_(i-j)  +  u . k_j  +  v . r_(i-j)

`reference_attention` reads like the equation. `fast_attention` computes the same with two matrix
products a head, the shift as a view, and no einsum. Both take the projected tensors, so a test can
hold one against the other. Source: Dai et al. 2019, arXiv:1901.02860, section 3.3, equation 5.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, einsum, nn
from torch.nn.functional import pad

from txl_dist.model.config import ModelConfig
from txl_dist.model.distances import align_distances, align_padded_distances
from txl_dist.model.dropout import Draws, Dropout

# Shapes: B lanes, T segment tokens, M memory tokens, S = M + T keys, D d_model, H heads, K d_head

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(q_BTHK, k_BSHK, r_SHK, u_HK, v_HK) -> scaled scores [B, H, T, S], not masked yet."""


def reference_scores(
    q_BTHK: Tensor, k_BSHK: Tensor, r_SHK: Tensor, u_HK: Tensor, v_HK: Tensor
) -> Tensor:
    """Equation 5, term by term."""
    content_BHTS = einsum("bthk,bshk->bhts", q_BTHK + u_HK, k_BSHK)
    by_distance_BHTS = einsum("bthk,shk->bhts", q_BTHK + v_HK, r_SHK)
    return (content_BHTS + align_distances(by_distance_BHTS)) * q_BTHK.shape[-1] ** -0.5


def fast_scores(
    q_BTHK: Tensor, k_BSHK: Tensor, r_SHK: Tensor, u_HK: Tensor, v_HK: Tensor
) -> Tensor:
    """Heads first, so that the distance scores of all lanes are one product a head.

    The zero row in front of the distances gives the shift its spare column without a copy, queries
    are scaled instead of scores, and `baddbmm` adds the content scores onto the shifted view.
    """
    num_lanes, num_queries, num_heads, d_head = q_BTHK.shape
    scale = d_head**-0.5
    q_HBTK = (q_BTHK * scale).permute(2, 0, 1, 3)
    q_u = (q_HBTK + (u_HK * scale)[:, None, None]).reshape(-1, num_queries, d_head)
    q_v = (q_HBTK + (v_HK * scale)[:, None, None]).reshape(num_heads, -1, d_head)
    k_T = k_BSHK.permute(2, 0, 3, 1).reshape(num_heads * num_lanes, d_head, -1)
    r_T = pad(r_SHK, (0, 0, 0, 0, 1, 0)).permute(1, 2, 0)

    by_distance = torch.bmm(q_v, r_T).unflatten(1, (num_lanes, num_queries))
    shifted = align_padded_distances(by_distance).flatten(0, 1)
    score_HBTS = torch.baddbmm(shifted, q_u, k_T).unflatten(0, (num_heads, num_lanes))
    return score_HBTS.transpose(0, 1)


SCORES: dict[str, ScoreFunction] = {
    "reference": reference_scores,
    "fast": fast_scores,
    "auto": fast_scores,
}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is the same for all layers of one segment."""

    distance_SD: Tensor
    """Encoded distances S - 1 .. 0."""
    visible_BTS: Tensor
    """Which keys each query may see (visibility.py)."""
    biases_HK: tuple[Tensor, Tensor] | None
    """u and v of equation 5; none if every layer has its own (`untie_r`)."""
    draws: Draws | None
    """Dropout masks; none when evaluating."""


class RelativeAttention(nn.Module):
    """Multi-head attention of a segment over [stop-gradient memory ; segment].

    forward(x_BTD, memory_BMD, around) -> out_BTD, without the residual. Keys and values of the
    memory pass through the current weights; no gradient passes on to the memory's own past, because
    `Memory.after` cut it off.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        width = config.n_head * config.d_head
        self.heads = (config.n_head, config.d_head)
        self.query = nn.Linear(config.d_model, width, bias=False)
        self.key_value = nn.Linear(config.d_model, 2 * width, bias=False)
        self.distance = nn.Linear(config.d_model, width, bias=False)
        self.out = nn.Linear(width, config.d_model, bias=False)
        if config.untie_r:
            self.content_bias_HK = nn.Parameter(torch.empty(self.heads))  # u of this layer
            self.distance_bias_HK = nn.Parameter(torch.empty(self.heads))  # v of this layer
        self.weight_dropout = Dropout(config.dropatt, layer=layer, place="attention weights")
        self.scores = SCORES[config.attention]

    def forward(self, x_BTD: Tensor, memory_BMD: Tensor, around: Surroundings) -> Tensor:
        context_BSD = torch.cat([memory_BMD, x_BTD], dim=1)
        q_BTHK = self.query(x_BTD).unflatten(-1, self.heads)
        k_BSHK, v_BSHK = self.key_value(context_BSD).unflatten(-1, (2, *self.heads)).unbind(-3)
        r_SHK = self.distance(around.distance_SD).unflatten(-1, self.heads)

        u_HK, v_HK = around.biases_HK or (self.content_bias_HK, self.distance_bias_HK)
        score_BHTS = self.scores(q_BTHK, k_BSHK, r_SHK, u_HK, v_HK)
        score_BHTS = score_BHTS.masked_fill(~around.visible_BTS[:, None], -torch.inf)
        weight_BHTS = self.weight_dropout(score_BHTS.softmax(dim=-1), around.draws)
        mixed_BTHK = (weight_BHTS @ v_BSHK.transpose(1, 2)).transpose(1, 2)
        return self.out(mixed_BTHK.flatten(-2))
