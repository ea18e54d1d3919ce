"""The attention that runs: the equation of attention.py without its waste, and the choice of form.

`fused_attention` is one autograd node for everything between the projections. Heads come first, so
that the distance scores of all lanes are one product a head; queries are scaled instead of scores;
the relative shift is a view, because the distances have a row to spare; content scores are added
onto that view in place. Its backward is written out, so that nothing but the weights is kept, and
no view's gradient is a copy into zeros.

`biased_attention` hands distance scores and mask to torch's scaled_dot_product_attention as a bias:
neither scores nor weights are kept beside it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention

from txl_dist.model.distances import align_distances, align_padded_distances
from txl_dist.model.encodings import DistanceTerms

# Shapes: B lanes, T segment tokens, S keys, R = 1 + S, H heads, K d_head, N = H B

AttentionFunction = Callable[[Tensor, Tensor, Tensor, DistanceTerms, Tensor, Tensor | None], Tensor]
"""(q_HBTK, k_HBSK, v_HBSK, terms, mask_BTS, keep_BHTS) -> mixed values [B, T, H, K].

The mask holds 0 and minus infinity; `keep_BHTS` multiplies the weights, for dropout.
"""


def fused_attention(
    q_HBTK: Tensor,
    k_HBSK: Tensor,
    v_HBSK: Tensor,
    terms: DistanceTerms,
    mask_BTS: Tensor,
    keep_BHTS: Tensor | None,
) -> Tensor:
    """For CPUs, and wherever weights are dropped."""
    score_HS, mask = terms.score_HS, mask_BTS
    if terms.distance_HSK is None and score_HS is not None:
        if score_HS.requires_grad:
            raise NotImplementedError("learned scores without learned distances have no gradient")
        mask, score_HS = mask_BTS + _align_fixed(score_HS, mask_BTS), None
    with torch.autocast(q_HBTK.device.type, enabled=False):
        return _FusedAttention.apply(
            q_HBTK,
            k_HBSK,
            v_HBSK,
            _like(terms.content_bias_HK, q_HBTK),
            _like(terms.distance_bias_HK, q_HBTK),
            _like(terms.distance_HSK, q_HBTK),
            _like(score_HS, q_HBTK),
            mask.to(q_HBTK.dtype),
            _like(keep_BHTS, q_HBTK),
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
        q_u, q_v = _scaled_query(q_HBTK, u_HK), _scaled_query(q_HBTK, v_HK)
        k_NSK, v_NSK = k_HBSK.flatten(0, 1), v_HBSK.flatten(0, 1)
        r_HRK = None if r_HSK is None else pad(r_HSK, (0, 0, 1, 0))
        if r_HRK is None:
            score_NTS = torch.bmm(q_u.flatten(0, 1), k_NSK.transpose(1, 2))
        else:
            score_NTS = _padded_distance_scores(q_v, r_HRK, b_HS)
            score_NTS.baddbmm_(q_u.flatten(0, 1), k_NSK.transpose(1, 2))
        weight_HBTS = score_NTS.unflatten(0, (num_heads, num_lanes)) + mask
        torch.softmax(weight_HBTS, -1, out=weight_HBTS)
        kept_HBTS = weight_HBTS if keep_BHTS is None else weight_HBTS * keep_BHTS.transpose(0, 1)
        mixed_NTK = torch.bmm(kept_HBTS.flatten(0, 1), v_NSK)
        ctx.save_for_backward(q_u, q_v, k_NSK, v_NSK, r_HRK, weight_HBTS, keep_BHTS, mixed_NTK)
        ctx.given = tuple(x is not None for x in (u_HK, v_HK, r_HSK, b_HS))
        return mixed_NTK.unflatten(0, (num_heads, num_lanes)).permute(1, 2, 0, 3).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_u, q_v, k_NSK, v_NSK, r_HRK, weight_HBTS, keep_BHTS, mixed_NTK = ctx.saved_tensors
        heads_first, d_head = q_u.shape[:2], q_u.shape[-1]
        has_u, has_v, has_r, has_b = ctx.given
        d_mixed_NTK = gradients[0].permute(2, 0, 1, 3).flatten(0, 1)

        kept_HBTS = weight_HBTS if keep_BHTS is None else weight_HBTS * keep_BHTS.transpose(0, 1)
        d_v_NSK = torch.bmm(kept_HBTS.flatten(0, 1).transpose(1, 2), d_mixed_NTK)
        d_weight_NTS = torch.bmm(d_mixed_NTK, v_NSK.transpose(1, 2))
        if keep_BHTS is not None:
            d_weight_NTS.view_as(weight_HBTS).mul_(keep_BHTS.transpose(0, 1))
        # Softmax's backward takes the weighted mean of the weights' gradients off each of them; it
        # equals the product of the output with its own gradient, which is shorter.
        d_weight_NTS -= (d_mixed_NTK * mixed_NTK).sum(-1, keepdim=True)
        if has_r:
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


def biased_attention(
    q_HBTK: Tensor,
    k_HBSK: Tensor,
    v_HBSK: Tensor,
    terms: DistanceTerms,
    mask_BTS: Tensor,
    keep_BHTS: Tensor | None,
) -> Tensor:
    """For GPUs, and for CPUs when no gradient is needed."""
    if keep_BHTS is not None:
        return fused_attention(q_HBTK, k_HBSK, v_HBSK, terms, mask_BTS, keep_BHTS)
    u_HK, v_HK = _like(terms.content_bias_HK, q_HBTK), _like(terms.distance_bias_HK, q_HBTK)
    bias = mask_BTS.to(q_HBTK.dtype)
    if terms.distance_HSK is not None:
        r_HSK, b_HS = terms.distance_HSK.to(q_HBTK.dtype), _like(terms.score_HS, q_HBTK)
        score_NTS = _distance_scores(_scaled_query(q_HBTK, v_HK), r_HSK, b_HS)
        bias = score_NTS.unflatten(0, q_HBTK.shape[:2]) + bias
    elif terms.score_HS is not None:
        bias = bias + _align_fixed(terms.score_HS, mask_BTS).to(q_HBTK.dtype)
    query_HBTK = q_HBTK if u_HK is None else q_HBTK + u_HK[:, None, None]
    mixed_HBTK = scaled_dot_product_attention(query_HBTK, k_HBSK, v_HBSK, attn_mask=bias)
    return mixed_HBTK.permute(1, 2, 0, 3)


def _like(x: Tensor | None, q_HBTK: Tensor) -> Tensor | None:
    return None if x is None else x.to(q_HBTK.dtype)


def _scaled_query(q_HBTK: Tensor, bias_HK: Tensor | None) -> Tensor:
    """(q + bias) / sqrt(K), packed."""
    scale = q_HBTK.shape[-1] ** -0.5
    if bias_HK is None:
        return (q_HBTK * scale).contiguous()
    bias_H11K = (bias_HK * scale)[:, None, None]
    if torch.is_grad_enabled():
        return torch.add(bias_H11K, q_HBTK, alpha=scale).contiguous()
    packed = torch.empty(q_HBTK.shape, dtype=q_HBTK.dtype, device=q_HBTK.device)
    return torch.add(bias_H11K, q_HBTK, alpha=scale, out=packed)


def _distance_scores(q_HBTK: Tensor, r_HSK: Tensor, b_HS: Tensor | None) -> Tensor:
    """Scores by distance, aligned with keys: [N, T, S]."""
    if q_HBTK.shape[2] > 1:
        return _padded_distance_scores(q_HBTK, pad(r_HSK, (0, 0, 1, 0)), b_HS)
    # One query stands where no shift is needed, and a copy of all distances would cost the most.
    score_HBS = torch.bmm(q_HBTK.flatten(1, 2), r_HSK.transpose(1, 2))
    if b_HS is not None:
        score_HBS = score_HBS + b_HS[:, None]
    return score_HBS.flatten(0, 1)[:, None]


def _padded_distance_scores(q_HBTK: Tensor, r_HRK: Tensor, b_HS: Tensor | None) -> Tensor:
    """The same as a view into the product of all heads; `r_HRK` has a row to spare in front."""
    num_heads, num_lanes, num_queries, _ = q_HBTK.shape
    product_HXR = torch.bmm(q_HBTK.flatten(1, 2), r_HRK.transpose(1, 2))
    if b_HS is not None:
        product_HXR = product_HXR + pad(b_HS, (1, 0))[:, None]
    return align_padded_distances(product_HXR.view(num_heads * num_lanes, num_queries, -1))


def _empty_distance_scores(like_NTS: Tensor, heads_first: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Room for the gradient of scores by distance [H, B, T, R], and its aligned view [N, T, S]."""
    _, num_queries, num_keys = like_NTS.shape
    room_HBTR = like_NTS.new_empty(*heads_first, num_queries, num_keys + 1)
    by_distance_NTR = room_HBTR.flatten(0, 1)
    by_distance_NTR.flatten(1)[:, :num_queries] = 0  # all that the view leaves out
    return room_HBTR, align_padded_distances(by_distance_NTR)


def _align_fixed(score_HS: Tensor, mask_BTS: Tensor) -> Tensor:
    """Scores of distances alone, for every query: [H, 1, T, S]."""
    return align_distances(score_HS[:, None, None].expand(-1, 1, mask_BTS.shape[-2], -1))


def choose_attention(name: str, *, device: torch.device) -> AttentionFunction:
    """The form that is named; for `auto`, the fastest here (docs/experiments.md, 2026-11-21).

    torch has a kernel with a bias for CPUs too, but not for its gradient.
    """
    if name == "auto":
        fused = device.type == "cpu" and torch.is_grad_enabled()
        return fused_attention if fused else biased_attention
    return FORMS[name]


FORMS: dict[str, AttentionFunction] = {"fused": fused_attention, "biased": biased_attention}
