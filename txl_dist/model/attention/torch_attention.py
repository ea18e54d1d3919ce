"""Attention by torch's operations: the equation, training on CPUs, and inference on CPUs.

`reference` is the equation, written term by term. The tests compare all others with it.

    A_ij = q_i . k_j  +  (q_i + v) . r_(i-j)  +  u . k_j  +  b_(i-j)

Which of u, v, r and b exist is decided by the distance encoding (encodings.py).

`cpu`, for training and dropout, is one autograd node with its own backward, which covers everything
between the projections. Compared with autograd through the equation:

- distance scores are one product per head for all lanes, and the relative shift is a view
  (encodings.py);
- content scores are added in place onto that view;
- the softmax is computed in place, and the backward keeps one [H, B, T, S] tensor, the weights;
- the gradient of the shifted view is computed in place, without a copy into zeros.

`sdpa`, without gradients, is torch's scaled_dot_product_attention, which is 8 % faster in
evaluation (docs/experiments.md). Distance scores and mask are passed as an additive bias
[H, B, T, S]. Torch's kernel has no gradient for the bias, and takes no dropout mask.

Source: Dai et al. 2019, arXiv:1901.02860, section 3.3.
"""

from typing import Any

import torch
from torch import Tensor, einsum
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention

from txl_dist.model.encodings import (
    DistanceTerms,
    align_constant_scores,
    align_distances,
    align_padded_distances,
    cast_like,
    padded_distance_scores,
    scaled_query,
)
from txl_dist.model.visibility import Visibility

# Shapes: B lanes, T segment tokens, S keys, R = 1 + S, H heads, K d_head, N = H B, X = B T


def reference_scores(q_HBTK: Tensor, k_HBSK: Tensor, terms: DistanceTerms) -> Tensor:
    """Scaled scores [B, H, T, S], without the mask."""
    u_HK, v_HK, scale = terms.content_bias_HK, terms.distance_bias_HK, q_HBTK.shape[-1] ** -0.5
    q_u = q_HBTK if u_HK is None else q_HBTK + u_HK[:, None, None]
    score_BHTS = einsum("hbtk,hbsk->bhts", q_u, k_HBSK) * scale
    if terms.distance_HSK is not None:
        q_v = q_HBTK if v_HK is None else q_HBTK + v_HK[:, None, None]
        by_distance_BHTS = einsum("hbtk,hsk->bhts", q_v, terms.distance_HSK) * scale
        score_BHTS = score_BHTS + align_distances(by_distance_BHTS)
    if terms.score_HS is not None:
        by_distance_HTS = terms.score_HS[:, None].repeat(1, q_HBTK.shape[2], 1)
        score_BHTS = score_BHTS + align_distances(by_distance_HTS)
    return score_BHTS


def reference_weights(
    q_HBTK: Tensor, k_HBSK: Tensor, terms: DistanceTerms, mask_BTS: Tensor
) -> Tensor:
    """Attention weights [B, H, T, S]; each row sums to 1."""
    return (reference_scores(q_HBTK, k_HBSK, terms) + mask_BTS[:, None]).softmax(dim=-1)


def reference(
    q_HBTK: Tensor,
    k_HBSK: Tensor,
    v_HBSK: Tensor,
    terms: DistanceTerms,
    visibility: Visibility,
    keep_BHTS: Tensor | None,
) -> Tensor:
    """Weighted sums of the values, [B, T, H, K]."""
    weight_BHTS = reference_weights(q_HBTK, k_HBSK, terms, visibility.mask)
    if keep_BHTS is not None:
        weight_BHTS = weight_BHTS * keep_BHTS
    return einsum("bhts,hbsk->bthk", weight_BHTS.to(v_HBSK.dtype), v_HBSK)


def cpu(
    q_HBTK: Tensor,
    k_HBSK: Tensor,
    v_HBSK: Tensor,
    terms: DistanceTerms,
    visibility: Visibility,
    keep_BHTS: Tensor | None,
) -> Tensor:
    """Weighted sums of the values, [B, T, H, K]."""
    score_HS, mask = terms.score_HS, visibility.mask
    if terms.distance_HSK is None and score_HS is not None:
        if score_HS.requires_grad:
            # They are added to the mask, whose gradient is not computed.
            raise NotImplementedError("learned scores without learned distances have no gradient")
        mask, score_HS = mask + align_constant_scores(score_HS, mask), None
    # Autocast would cast inside the node; its inputs already have the dtype of the projections.
    with torch.autocast(q_HBTK.device.type, enabled=False):
        return _FusedAttention.apply(
            q_HBTK,
            k_HBSK,
            v_HBSK,
            cast_like(terms.content_bias_HK, q_HBTK),
            cast_like(terms.distance_bias_HK, q_HBTK),
            cast_like(terms.distance_HSK, q_HBTK),
            cast_like(score_HS, q_HBTK),
            mask.to(q_HBTK.dtype),
            cast_like(keep_BHTS, q_HBTK),
        )


class _FusedAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_HBTK: Tensor,
        k_HBSK: Tensor,
        v_HBSK: Tensor,
        u_HK: Tensor | None,
        v_HK: Tensor | None,
        r_HSK: Tensor | None,
        b_HS: Tensor | None,
        mask: Tensor,
        keep_BHTS: Tensor | None,
    ) -> Tensor:
        num_heads, num_lanes = q_HBTK.shape[:2]
        q_u, q_v = scaled_query(q_HBTK, u_HK), scaled_query(q_HBTK, v_HK)
        k_NSK, v_NSK = k_HBSK.flatten(0, 1), v_HBSK.flatten(0, 1)
        r_HRK = None if r_HSK is None else pad(r_HSK, (0, 0, 1, 0))
        # Scores: by distance first, then the content scores are added in place onto the view.
        if r_HRK is None:
            score_NTS = torch.bmm(q_u.flatten(0, 1), k_NSK.transpose(1, 2))
        else:
            score_NTS = padded_distance_scores(q_v, r_HRK, b_HS)
            score_NTS.baddbmm_(q_u.flatten(0, 1), k_NSK.transpose(1, 2))
        # The addition also makes the shifted view contiguous, so softmax can overwrite it.
        weight_HBTS = score_NTS.unflatten(0, (num_heads, num_lanes)) + mask
        torch.softmax(weight_HBTS, -1, out=weight_HBTS)
        kept_HBTS = weight_HBTS if keep_BHTS is None else weight_HBTS * keep_BHTS.transpose(0, 1)
        mixed_NTK = torch.bmm(kept_HBTS.flatten(0, 1), v_NSK)
        ctx.save_for_backward(q_u, q_v, k_NSK, v_NSK, r_HRK, weight_HBTS, keep_BHTS, mixed_NTK)
        ctx.has_terms = tuple(x is not None for x in (u_HK, v_HK, r_HSK, b_HS))
        return mixed_NTK.unflatten(0, (num_heads, num_lanes)).permute(1, 2, 0, 3).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_u, q_v, k_NSK, v_NSK, r_HRK, weight_HBTS, keep_BHTS, mixed_NTK = ctx.saved_tensors
        heads_first, d_head = q_u.shape[:2], q_u.shape[-1]
        has_u, has_v, has_r, has_b = ctx.has_terms
        d_mixed_NTK = gradients[0].permute(2, 0, 1, 3).flatten(0, 1)

        # Weights after dropout are computed again: storing them would double the memory.
        kept_HBTS = weight_HBTS if keep_BHTS is None else weight_HBTS * keep_BHTS.transpose(0, 1)
        d_v_NSK = torch.bmm(kept_HBTS.flatten(0, 1).transpose(1, 2), d_mixed_NTK)
        d_weight_NTS = torch.bmm(d_mixed_NTK, v_NSK.transpose(1, 2))
        if keep_BHTS is not None:
            d_weight_NTS.view_as(weight_HBTS).mul_(keep_BHTS.transpose(0, 1))
        # Softmax: d_score = weight * (d_weight - sum(weight * d_weight)). The sum over S keys
        # equals sum(d_mixed * mixed) over K channels, which is cheaper.
        d_weight_NTS -= (d_mixed_NTK * mixed_NTK).sum(-1, keepdim=True)
        if has_r:
            # d_score is written through the aligned view, so d_distance needs no shift back.
            d_distance_HBTR, d_score_NTS = _empty_distance_scores(d_weight_NTS, heads_first)
            torch.mul(d_weight_NTS, weight_HBTS.flatten(0, 1), out=d_score_NTS)
        else:
            d_score_NTS = d_weight_NTS.mul_(weight_HBTS.flatten(0, 1))

        d_q_u = torch.bmm(d_score_NTS, k_NSK).view_as(q_u)
        d_k_NSK = torch.bmm(d_score_NTS.transpose(1, 2), q_u.flatten(0, 1))
        d_u_HK = d_q_u.sum((1, 2)) * d_head**-0.5 if has_u else None
        d_v_HK = d_r_HSK = d_b_HS = None
        if has_r:
            d_distance_HXR = d_distance_HBTR.flatten(1, 2)
            d_q_v = torch.bmm(d_distance_HXR, r_HRK).view_as(q_u)
            d_r_HSK = torch.bmm(d_distance_HXR.transpose(1, 2), q_v.flatten(1, 2))[:, 1:]
            d_v_HK = d_q_v.sum((1, 2)) * d_head**-0.5 if has_v else None
            d_b_HS = d_distance_HXR.sum(1)[:, 1:] if has_b else None
            d_q_u += d_q_v
        return (
            d_q_u.mul_(d_head**-0.5),
            d_k_NSK.unflatten(0, heads_first),
            d_v_NSK.unflatten(0, heads_first),
            d_u_HK,
            d_v_HK,
            d_r_HSK,
            d_b_HS,
            None,
            None,
        )


def _empty_distance_scores(like_NTS: Tensor, heads_first: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """An empty gradient of the scores by distance [H, B, T, R], and its aligned view [N, T, S]."""
    _, num_queries, num_keys = like_NTS.shape
    gradient_HBTR = like_NTS.new_empty(*heads_first, num_queries, num_keys + 1)
    by_distance_NTR = gradient_HBTR.flatten(0, 1)
    # The view covers all but the first T numbers of a head and lane; only those need zeros.
    by_distance_NTR.flatten(1)[:, :num_queries] = 0
    return gradient_HBTR, align_padded_distances(by_distance_NTR)


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
        r_HRK = pad(terms.distance_HSK, (0, 0, 1, 0))
        return padded_distance_scores(q_HBTK, r_HRK.to(q_HBTK.dtype), b_HS)
    # A single query needs no shift, so r is not copied to pad it. In generation, one token per
    # call, that copy would cost more than the product.
    r_HSK = terms.distance_HSK.to(q_HBTK.dtype)
    score_HBS = torch.bmm(q_HBTK.flatten(1, 2), r_HSK.transpose(1, 2))
    if b_HS is not None:
        score_HBS = score_HBS + b_HS[:, None]
    return score_HBS.flatten(0, 1)[:, None]
