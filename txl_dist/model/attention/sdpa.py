"""Attention for CPUs without gradients, by torch's scaled_dot_product_attention.

Distance scores and mask are passed as an additive bias [H, B, T, S], so of all tensors of that size
only the bias is stored. In evaluation on CPUs this is 8 % faster than attention/cpu.py
(docs/experiments.md), but torch's CPU kernel has no gradient for the bias. Dropout masks
cannot be passed to it: when attention weights are dropped, another implementation runs instead
(`choose_implementation`).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from txl_dist.model.encodings import (
    DistanceTerms,
    align_constant_scores,
    cast_like,
    padded_distance_scores,
    scaled_query,
)
from txl_dist.model.visibility import Visibility

# Shapes: B lanes, T segment tokens, S keys, H heads, K d_head, N = H B


def sdpa(
    q_HBTK: Tensor,
    k_HBSK: Tensor,
    v_HBSK: Tensor,
    terms: DistanceTerms,
    visibility: Visibility,
    keep_BHTS: Tensor | None,
) -> Tensor:
    """Weighted sums of the values, [B, T, H, K]. `keep_BHTS` must be None."""
    if keep_BHTS is not None:
        raise NotImplementedError("sdpa has no dropout; choose_implementation takes another one")
    u_HK, v_HK = cast_like(terms.content_bias_HK, q_HBTK), cast_like(terms.distance_bias_HK, q_HBTK)
    bias = visibility.mask.to(q_HBTK.dtype)
    if terms.distance_HSK is not None:
        score_NTS = _distance_scores(scaled_query(q_HBTK, v_HK), terms)
        bias = score_NTS.unflatten(0, q_HBTK.shape[:2]) + bias
    elif terms.score_HS is not None:
        bias = bias + align_constant_scores(terms.score_HS, bias).to(q_HBTK.dtype)
    query_HBTK = q_HBTK if u_HK is None else q_HBTK + u_HK[:, None, None]
    mixed_HBTK = scaled_dot_product_attention(query_HBTK, k_HBSK, v_HBSK, attn_mask=bias)
    return mixed_HBTK.permute(1, 2, 0, 3)


def _distance_scores(q_HBTK: Tensor, terms: DistanceTerms) -> Tensor:
    """Scores by distance, aligned with the keys: [N, T, S]."""
    assert terms.distance_HSK is not None
    b_HS = cast_like(terms.score_HS, q_HBTK)
    if q_HBTK.shape[2] > 1:
        r_HRK = terms.padded_distance_HRK
        if r_HRK is None:
            r_HRK = pad(terms.distance_HSK, (0, 0, 1, 0))
        return padded_distance_scores(q_HBTK, r_HRK.to(q_HBTK.dtype), b_HS)
    # A single query needs no shift, so r is not copied to pad it. In generation, one token per
    # call, that copy would cost more than the product.
    r_HSK = terms.distance_HSK.to(q_HBTK.dtype)
    score_HBS = torch.bmm(q_HBTK.flatten(1, 2), r_HSK.transpose(1, 2))
    if b_HS is not None:
        score_HBS = score_HBS + b_HS[:, None]
    return score_HBS.flatten(0, 1)[:, None]
