"""The equation of attention, written term by term. The tests compare all others with it.

    A_ij = q_i . k_j  +  (q_i + v) . r_(i-j)  +  u . k_j  +  b_(i-j)

Which of u, v, r and b exist is decided by the distance encoding (encodings.py).
Source: Dai et al. 2019, arXiv:1901.02860, section 3.3.
"""

from torch import Tensor, einsum

from txl_dist.model.encodings import DistanceTerms, align_distances
from txl_dist.model.visibility import Visibility

# Shapes: B lanes, T segment tokens, M memory tokens, S = M + T keys, H heads, K d_head


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
        num_queries = q_HBTK.shape[2]
        by_distance_HTS = terms.score_HS[:, None].repeat(1, num_queries, 1)
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
