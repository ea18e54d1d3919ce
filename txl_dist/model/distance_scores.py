"""Scores by distance, as the fast forms of attention compute them.

Heads come first, so that one product per head serves all lanes. The relative shift is a view: r is
padded by one row in front, and the product with that row is the spare column that
`align_padded_distances` needs.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from txl_dist.model.distances import align_distances, align_padded_distances

# Shapes: B lanes, T segment tokens, S keys, R = 1 + S, H heads, K d_head, N = H B


def cast_like(x: Tensor | None, q_HBTK: Tensor) -> Tensor | None:
    """`x` in the dtype of the queries, which under autocast is not that of the parameters."""
    return None if x is None else x.to(q_HBTK.dtype)


def pad_channels(x: Tensor) -> Tensor:
    """`x` with its last dimension padded by zeros to a multiple of 16.

    Then rows are multiples of 16 bytes in every dtype. GPUs load those asynchronously and in few
    instructions, and some of torch's kernels require them. The paper's base has a d_head of 41.
    """
    return pad(x, (0, -x.shape[-1] % 16)) if x.shape[-1] % 16 else x


def scaled_query(q_HBTK: Tensor, bias_HK: Tensor | None) -> Tensor:
    """(q + bias) / sqrt(K), contiguous. Queries are scaled because scores are larger tensors."""
    scale = q_HBTK.shape[-1] ** -0.5
    if bias_HK is None:
        return (q_HBTK * scale).contiguous()
    bias_H11K = (bias_HK * scale)[:, None, None]
    if torch.is_grad_enabled():  # `out=` cannot be differentiated
        return torch.add(bias_H11K, q_HBTK, alpha=scale).contiguous()
    packed = torch.empty(q_HBTK.shape, dtype=q_HBTK.dtype, device=q_HBTK.device)
    return torch.add(bias_H11K, q_HBTK, alpha=scale, out=packed)


def padded_distance_scores(q_HBTK: Tensor, r_HRK: Tensor, b_HS: Tensor | None) -> Tensor:
    """Scores by distance, aligned with the keys: [N, T, S], a view into the product.

    Row 0 of `r_HRK` is padding.
    """
    num_heads, num_lanes, num_queries, _ = q_HBTK.shape
    product_HXR = torch.bmm(q_HBTK.flatten(1, 2), r_HRK.transpose(1, 2))
    if b_HS is not None:
        product_HXR = product_HXR + pad(b_HS, (1, 0))[:, None]
    return align_padded_distances(product_HXR.view(num_heads * num_lanes, num_queries, -1))


def align_constant_scores(score_HS: Tensor, mask_BTS: Tensor) -> Tensor:
    """Scores that depend on the distance alone, aligned with the keys: [H, 1, T, S]."""
    return align_distances(score_HS[:, None, None].expand(-1, 1, mask_BTS.shape[-2], -1))
