"""Attention for GPUs, by the kernels of triton_kernels.py.

Scores by distance are one product per class of queries, [H, C, B, N, W]: query t = C n + j is in
class j and row n (triton_kernels.py says why). Everything else of that size exists only as tiles
inside the kernels: no weights are stored, no mask is built. Besides scores by distance and their
gradient, memory is proportional to T + S per head. A dropout mask has one bit per weight, a
sixteenth of the scores in bf16.

Forward and backward are custom operators of torch, so they work with fake tensors, torch.compile
and activation checkpointing. Products with r, and the sums for u, v and b, are autograd's.
On CPUs the kernels run in triton's interpreter if TRITON_INTERPRET=1 is set before triton is
imported.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import register_autograd
from torch.nn.functional import pad

from txl_dist.model.devices import define_operator
from txl_dist.model.dropout import KeepBits
from txl_dist.model.encodings import DistanceTerms, cast_like, pad_channels, scaled_query
from txl_dist.model.visibility import Visibility

# Shapes: B lanes, T segment tokens, S keys, H heads, K d_head, C classes of queries,
# N = ceil(T / C) queries of a class, W columns of scores by distance

NUM_CLASSES = 8
"""C, as in triton_kernels.py."""
COLUMN_MULTIPLE = 16
"""W is a multiple of this: cuBLAS and the kernels load rows 16 bytes at a time."""


def triton(
    q_HBTK: Tensor,
    first: Tensor,
    second: Tensor,
    terms: DistanceTerms,
    visibility: Visibility,
    keep: KeepBits | None,
) -> Tensor:
    """Weighted sums of the values, [B, T, H, K].

    `first` and `second` are keys and values [H, B, S, K], or those of memory and segment as they
    are projected, [B, N, 2 H K]. These are not copied, so K must be a multiple of 16 then.
    """
    padded = (pad_channels(x) for x in (first, second))
    mixed_BTHK, _ = torch.ops.txl_dist.relative_attention(
        pad_channels(scaled_query(q_HBTK, cast_like(terms.content_bias_HK, q_HBTK))),
        # Gradients are written with their strides. Those of a KV cache, without any, are views.
        *(x.contiguous() if torch.is_grad_enabled() else x for x in padded),
        _distance_scores(q_HBTK, terms),
        visibility.reach_BT.expand(q_HBTK.shape[1], -1).to(torch.int32).contiguous(),
        *(keep or (None, 0.0)),
    )
    return mixed_BTHK[..., : q_HBTK.shape[-1]]


def _distance_scores(q_HBTK: Tensor, terms: DistanceTerms) -> Tensor | None:
    """Scores by distance [H, C, B, N, W], as triton_kernels.py reads them; None without any."""
    num_lanes, num_queries = q_HBTK.shape[1:3]
    num_rows = -(-num_queries // NUM_CLASSES)
    # In generation only the first class has a query: the others get its scores, which nobody reads.
    num_classes = 1 if num_queries == 1 else NUM_CLASSES
    b_HS = terms.score_HS
    b_HCW = None if b_HS is None else _by_class(b_HS, num_queries, num_classes)
    if terms.distance_HSK is None:
        if b_HCW is None:
            return None
        return b_HCW[:, :, None, None].expand(-1, NUM_CLASSES, num_lanes, num_rows, -1)
    q_v = pad_channels(scaled_query(q_HBTK, cast_like(terms.distance_bias_HK, q_HBTK)))
    num_padding = NUM_CLASSES * num_rows - num_queries
    q_HBNCK = pad(q_v, (0, 0, 0, num_padding)).unflatten(2, (num_rows, NUM_CLASSES))
    q_HCXK = q_HBNCK.permute(0, 3, 1, 2, 4)[:, :num_classes].flatten(2, 3)
    r_HCWK = _by_class(pad_channels(terms.distance_HSK), num_queries, num_classes)
    score_HCXW = torch.matmul(q_HCXK, r_HCWK.to(q_HBTK.dtype).transpose(2, 3))
    if b_HCW is not None:
        score_HCXW = score_HCXW + b_HCW[:, :, None].to(q_HBTK.dtype)
    score_HCBNW = score_HCXW.unflatten(2, (num_lanes, num_rows))
    return score_HCBNW.expand(-1, NUM_CLASSES, -1, -1, -1)


def _by_class(by_distance: Tensor, num_queries: int, num_classes: int) -> Tensor:
    """Rows by distance, [H, S, ...] -> [H, C, W, ...], shifted for each class of queries.

    Row n of class j reads key s from column s + C (N - 1 - n). It has the distance M + t - s, which
    is row T - 1 - t + s of the input; so column w is row w + C - 1 - j - (C N - T). In fp32 at
    least, because the gradient of a row is the sum of those of its copies.
    """
    num_keys, num_padding = by_distance.shape[1], -num_queries % NUM_CLASSES
    num_columns = num_keys + num_padding
    num_columns += -num_columns % COLUMN_MULTIPLE
    num_after = num_columns + NUM_CLASSES - 1 - num_keys - num_padding
    rest = (0, 0) * (by_distance.dim() - 2)
    wide = by_distance.to(torch.promote_types(by_distance.dtype, torch.float32))
    padded = pad(wide, (*rest, num_padding, num_after))
    return torch.stack(
        [padded[:, NUM_CLASSES - 1 - number :][:, :num_columns] for number in range(num_classes)],
        dim=1,
    )


def empty_outputs(q_HBTK: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    """For the results of `relative_attention`."""
    num_heads, num_lanes, num_queries, d_head = q_HBTK.shape
    dtype = torch.promote_types(q_HBTK.dtype, torch.float32)
    return (
        q_HBTK.new_empty(num_lanes, num_queries, num_heads, d_head),
        q_HBTK.new_empty(num_heads, num_lanes, num_queries, dtype=dtype),
    )


def empty_gradients(
    d_mixed_BTHK: Tensor,
    q_HBTK: Tensor,
    first: Tensor,
    second: Tensor,
    distance_HCBNW: Tensor | None,
    *saved: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For those of `relative_attention_backward`, contiguous. Each element is stored once."""
    d_distance = q_HBTK.new_empty(0)
    if saved[-1]:  # wants_distance
        assert distance_HCBNW is not None
        d_distance = distance_HCBNW.new_empty(distance_HCBNW.shape)
    d_q, d_first, d_second = (x.new_empty(x.shape) for x in (q_HBTK, first, second))
    return d_q, d_first, d_second, d_distance


# q is scaled. `first` and `second` are those of `triton`. They and q are contiguous, but keys and
# values without gradients need not be. `distance`: see `_distance_scores`. `keep_words` and its
# factor are those of `KeepBits`. Results are the weighted sums of the values [B, T, H, K] and the
# binary logsumexp of the scores [H, B, T]; those of backward are gradients of q, `first`, `second`
# and `distance`, the last empty unless `wants_distance`.
_INPUTS = (
    "Tensor q, Tensor first, Tensor second, Tensor? distance, Tensor reach, Tensor? keep_words,"
    " float keep_factor"
)
define_operator(
    "relative_attention",
    f"({_INPUTS}) -> (Tensor, Tensor)",
    kernel="txl_dist.model.attention.triton_launch:relative_attention",
    empty_results=empty_outputs,
)
define_operator(
    "relative_attention_backward",
    f"(Tensor d_mixed, {_INPUTS}, Tensor mixed, Tensor logsumexp, bool wants_distance)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    kernel="txl_dist.model.attention.triton_launch:relative_attention_backward",
    empty_results=empty_gradients,
)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.keep_factor = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, d_mixed_BTHK: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    wants_distance = ctx.needs_input_grad[3]
    *inputs, mixed_BTHK, logsumexp_HBT = ctx.saved_tensors
    *gradients, d_distance = torch.ops.txl_dist.relative_attention_backward(
        d_mixed_BTHK, *inputs, ctx.keep_factor, mixed_BTHK, logsumexp_HBT, wants_distance
    )
    return (*gradients, d_distance if wants_distance else None, None, None, None)


register_autograd("txl_dist::relative_attention", _gradients, setup_context=_save_for_backward)
