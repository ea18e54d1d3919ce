"""Attention over memory and segment: the layer's projections, and the equation spelled out.

    A_ij = q_i . k_j  +  (q_i + v) . r_(i-j)  +  u . k_j  +  b_(i-j)

`reference_attention` reads like that and is the oracle; `fast_attention.py` has the forms that run.
All take projected tensors, heads first, so that tests can hold one against the other. Which of the
terms there are is `encodings.py`'s. Source: Dai et al. 2019, arXiv:1901.02860, section 3.3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, einsum, nn

from txl_dist.model.config import ModelConfig
from txl_dist.model.distances import align_distances
from txl_dist.model.dropout import Dropout, DropoutMasks
from txl_dist.model.encodings import ENCODINGS, Biases, DistanceTerms, apply_rotary
from txl_dist.model.fast_attention import AttentionFunction, choose_attention
from txl_dist.model.kv_cache import LayerKVCache
from txl_dist.model.packing import heads_first, pack_heads

# Shapes: B lanes, T segment tokens, M memory tokens, S = M + T keys, D d_model, H heads, K d_head


def reference_scores(q_HBTK: Tensor, k_HBSK: Tensor, terms: DistanceTerms) -> Tensor:
    """The equation, term by term: scaled scores [B, H, T, S], not masked."""
    u_HK, v_HK, scale = terms.content_bias_HK, terms.distance_bias_HK, q_HBTK.shape[-1] ** -0.5
    q_u = q_HBTK if u_HK is None else q_HBTK + u_HK[:, None, None]
    score_BHTS = einsum("hbtk,hbsk->bhts", q_u, k_HBSK) * scale
    if terms.distance_HSK is not None:
        q_v = q_HBTK if v_HK is None else q_HBTK + v_HK[:, None, None]
        by_distance_BHTS = einsum("hbtk,hsk->bhts", q_v, terms.distance_HSK) * scale
        score_BHTS = score_BHTS + align_distances(by_distance_BHTS)
    if terms.score_HS is not None:
        num_queries = q_HBTK.shape[2]
        by_distance_HTS = terms.score_HS[:, None].repeat(1, num_queries, 1)
        score_BHTS = score_BHTS + align_distances(by_distance_HTS)
    return score_BHTS


def reference_weights(
    q_HBTK: Tensor, k_HBSK: Tensor, terms: DistanceTerms, mask_BTS: Tensor
) -> Tensor:
    """How much each query takes of each key [B, H, T, S]; rows sum to 1."""
    return (reference_scores(q_HBTK, k_HBSK, terms) + mask_BTS[:, None]).softmax(dim=-1)


def reference_attention(
    q_HBTK: Tensor,
    k_HBSK: Tensor,
    v_HBSK: Tensor,
    terms: DistanceTerms,
    mask_BTS: Tensor,
    keep_BHTS: Tensor | None,
) -> Tensor:
    """Mixed values [B, T, H, K]."""
    weight_BHTS = reference_weights(q_HBTK, k_HBSK, terms, mask_BTS)
    if keep_BHTS is not None:
        weight_BHTS = weight_BHTS * keep_BHTS
    return einsum("bhts,hbsk->bthk", weight_BHTS.to(v_HBSK.dtype), v_HBSK)


Watch = Callable[[int, Tensor], None]
"""Is shown every layer's number and attention weights [B, H, T, S]."""


@dataclass(frozen=True, slots=True)
class SegmentContext:
    """What is the same for all layers of one segment."""

    distances: Any
    """What the encoding prepared for S keys (encodings.py)."""
    biases_HK: Biases | None
    """u and v; none if every layer has its own (`untie_r`), or the encoding has none."""
    mask_BTS: Tensor
    """0 where a query may see a key, else minus infinity (visibility.py)."""
    draws: DropoutMasks | None
    """Dropout masks; none when evaluating."""
    watch: Watch | None = None


class Attention(nn.Module):
    """Multi-head attention of a segment over [stop-gradient memory ; segment].

    forward(x_BTD, past, around) -> out_BTD, without the residual. `past` is the memory: inputs
    [B, M, D], whose keys and values are projected here by the current weights, or, when no gradient
    is needed, the layer's state of inference, which kept them.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        width = config.n_head * config.d_head
        self.heads = (config.n_head, config.d_head)
        self.query = nn.Linear(config.d_model, width, bias=False)
        self.key_value = nn.Linear(config.d_model, 2 * width, bias=False)
        self.distances = ENCODINGS[config.distance_encoding](config)
        self.out = nn.Linear(width, config.d_model, bias=False)
        self.weight_dropout = Dropout(config.dropatt, layer=layer, place="attention weights")
        self.implementation = config.attention

    def forward(
        self, x_BTD: Tensor, past: "Tensor | LayerKVCache", around: SegmentContext
    ) -> Tensor:
        q_HBTK = self.query(x_BTD).unflatten(-1, self.heads).permute(2, 0, 1, 3)
        if isinstance(past, LayerKVCache):
            k_HBSK, v_HBSK = past.append(*heads_first(self.key_value(x_BTD), self.heads))
            terms = past.terms(k_HBSK.shape[2], lambda: self._terms(around))
        else:
            # Two projections: one of both together would compute a gradient for the memory too.
            projected = self.key_value(past), self.key_value(x_BTD)
            k_HBSK, v_HBSK = pack_heads(*projected, self.heads)
            terms = self._terms(around)
        if terms.turn_SK is not None:
            q_HBTK, k_HBSK = (
                apply_rotary(q_HBTK, terms.turn_SK),
                apply_rotary(k_HBSK, terms.turn_SK),
            )
        if around.watch is not None:
            weights = reference_weights(q_HBTK, k_HBSK, terms, around.mask_BTS)
            around.watch(self.weight_dropout.layer, weights)
        attention = self._form(x_BTD.device)
        keep_BHTS = self._keep(around, k_HBSK.shape[2])
        mixed_BTHK = attention(q_HBTK, k_HBSK, v_HBSK, terms, around.mask_BTS, keep_BHTS)
        return self.out(mixed_BTHK.flatten(-2))

    def _terms(self, around: SegmentContext) -> DistanceTerms:
        return self.distances(around.distances, around.biases_HK)

    def _keep(self, around: SegmentContext, num_keys: int) -> Tensor | None:
        """Which weights are kept, and by how much they grow for it."""
        num_lanes, num_queries, _ = around.mask_BTS.shape
        shape = (num_lanes, self.heads[0], num_queries, num_keys)
        return self.weight_dropout.scale(around.mask_BTS.new_zeros(()).expand(shape), around.draws)

    def _form(self, device: torch.device) -> AttentionFunction:
        if self.implementation == "reference":
            return reference_attention
        return choose_attention(self.implementation, device=device)
