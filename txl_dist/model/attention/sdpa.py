"""Attention for CPUs without gradients, and GPUs without triton: scaled_dot_product_attention.

Distance scores and mask are passed as an additive bias [H, B, T, S], so of all tensors of that size
only the bias is stored. In evaluation on CPUs this is 8 % faster than attention/cpu.py
(docs/experiments.md), but torch's CPU kernel has no gradient for the bias. Dropout masks
cannot be passed to it: when attention weights are dropped, another implementation runs instead
(`choose_implementation`).

On GPUs torch's memory-efficient kernel runs, in training and in evaluation. Without gradients torch
would prefer cuDNN, which has open bugs for masks (pytorch#196678, pytorch#191612).
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from txl_dist.model.encodings import (
    DistanceTerms,
    align_constant_scores,
    cast_like,
    pad_channels,
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
    if q_HBTK.device.type == "cpu":
        mixed_HBTK = scaled_dot_product_attention(query_HBTK, k_HBSK, v_HBSK, attn_mask=bias)
    else:
        mixed_HBTK = _efficient_attention(query_HBTK, k_HBSK, v_HBSK, bias)
    return mixed_HBTK.permute(1, 2, 0, 3)


def gpu_kernels() -> AbstractContextManager[None]:
    """Inside the context, scaled_dot_product_attention on a GPU takes one of the kernels above."""
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _efficient_attention(
    q_HBTK: Tensor, k_HBSK: Tensor, v_HBSK: Tensor, bias_HBTS: Tensor
) -> Tensor:
    """The memory-efficient kernel; where it refuses, products and a softmax.

    It refuses rows of a length that is not a multiple of 16 bytes, so d_head is padded.
    """
    d_head = q_HBTK.shape[-1]
    bias_HBTS = bias_HBTS.expand(*q_HBTK.shape[:3], k_HBSK.shape[2])
    q, k, v = pad_channels(q_HBTK), pad_channels(k_HBSK), pad_channels(v_HBSK)
    with gpu_kernels():
        mixed_HBTK = scaled_dot_product_attention(q, k, v, attn_mask=bias_HBTS, scale=d_head**-0.5)
    return mixed_HBTK[..., :d_head]


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
