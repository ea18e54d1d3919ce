"""Attention for GPUs, by the kernels of triton_kernels.py.

Scores by distance are one product per class of queries, [H, C, B, N, W]: query t = C n + j is in
class j and row n (triton_kernels.py says why). Everything else of that size exists only as tiles
inside the kernels: no weights are stored, no mask is built. Besides scores by distance and their
gradient, memory is proportional to T + S per head. A dropout mask has one bit per weight, a
sixteenth of the scores in bf16.

Forward and backward are custom operators of torch, so they work with fake tensors, torch.compile
and activation checkpointing. Products with r, and the sums for u, v and b, are autograd's.
This module does not import triton; triton_launch.py is imported when a kernel runs. On CPUs it
runs in triton's interpreter if TRITON_INTERPRET=1 is set before triton is imported.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import define, impl, register_autograd, register_fake
from torch.nn.functional import pad

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
    k_HBSK: Tensor,
    v_HBSK: Tensor,
    terms: DistanceTerms,
    visibility: Visibility,
    keep: KeepBits | None,
) -> Tensor:
    """Weighted sums of the values, [B, T, H, K]."""
    reach_BT = visibility.reach_BT.expand(q_HBTK.shape[1], -1).to(torch.int32).contiguous()
    mixed_BTHK, _ = torch.ops.txl_dist.relative_attention(
        pad_channels(scaled_query(q_HBTK, cast_like(terms.content_bias_HK, q_HBTK))),
        pad_channels(k_HBSK),
        pad_channels(v_HBSK),
        _distance_scores(q_HBTK, terms),
        reach_BT,
        *(keep or (None, 0.0)),
    )
    return mixed_BTHK[..., : q_HBTK.shape[-1]]


def _distance_scores(q_HBTK: Tensor, terms: DistanceTerms) -> Tensor | None:
    """Scores by distance [H, C, B, N, W], as triton_kernels.py reads them; None without any."""
    num_lanes, num_queries = q_HBTK.shape[1:3]
    num_rows = -(-num_queries // NUM_CLASSES)
    # In generation only the first class has a query: the others get its scores, which nobody reads.
    num_classes = 1 if num_queries == 1 else NUM_CLASSES
    b_HCW = None
    if terms.score_HS is not None:
        b_HCW = _by_class(terms.score_HS, num_queries, num_classes)
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


define(
    "txl_dist::relative_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? distance, Tensor reach, Tensor? keep_words,"
    " float keep_factor) -> (Tensor, Tensor)",
)
define(
    "txl_dist::relative_attention_backward",
    "(Tensor d_mixed, Tensor q, Tensor k, Tensor v, Tensor? distance, Tensor reach,"
    " Tensor? keep_words, float keep_factor, Tensor mixed, Tensor logsumexp, bool wants_distance)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)


@impl("txl_dist::relative_attention", "default")
def _relative_attention(
    q_HBTK: Tensor,
    k_HBSK: Tensor,
    v_HBSK: Tensor,
    distance_HCBNW: Tensor | None,
    reach_BT: Tensor,
    keep_words: Tensor | None,
    keep_factor: float,
) -> tuple[Tensor, Tensor]:
    """Weighted sums of the values [B, T, H, K], and the logsumexp of the scores [H, B, T].

    `q_HBTK` is scaled and contiguous. `distance_HCBNW`: see `_distance_scores`.
    `keep_words` and its factor are those of `KeepBits`.
    """
    from txl_dist.model.attention.triton_launch import forward

    outputs = _outputs(q_HBTK)
    forward((q_HBTK, k_HBSK, v_HBSK, distance_HCBNW, reach_BT, keep_words), keep_factor, outputs)
    return outputs


@register_fake("txl_dist::relative_attention")
def _(q_HBTK: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q_HBTK)


def _outputs(q_HBTK: Tensor) -> tuple[Tensor, Tensor]:
    num_heads, num_lanes, num_queries, d_head = q_HBTK.shape
    dtype = torch.promote_types(q_HBTK.dtype, torch.float32)
    return (
        q_HBTK.new_empty(num_lanes, num_queries, num_heads, d_head),
        q_HBTK.new_empty(num_heads, num_lanes, num_queries, dtype=dtype),
    )


@impl("txl_dist::relative_attention_backward", "default")
def _relative_attention_backward(
    d_mixed_BTHK: Tensor,
    q_HBTK: Tensor,
    k_HBSK: Tensor,
    v_HBSK: Tensor,
    distance_HCBNW: Tensor | None,
    reach_BT: Tensor,
    keep_words: Tensor | None,
    keep_factor: float,
    mixed_BTHK: Tensor,
    logsumexp_HBT: Tensor,
    wants_distance: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and `distance_HCBNW`; the last is empty unless `wants_distance`."""
    from txl_dist.model.attention.triton_launch import backward

    gradients = _gradients(q_HBTK, k_HBSK, v_HBSK, distance_HCBNW, wants_distance)
    inputs = q_HBTK, k_HBSK, v_HBSK, distance_HCBNW, reach_BT, keep_words
    outputs = mixed_BTHK, logsumexp_HBT
    backward(d_mixed_BTHK.contiguous(), inputs, keep_factor, outputs, gradients)
    return gradients


@register_fake("txl_dist::relative_attention_backward")
def _(
    d_mixed_BTHK: Tensor,
    q_HBTK: Tensor,
    k_HBSK: Tensor,
    v_HBSK: Tensor,
    distance_HCBNW: Tensor | None,
    reach_BT: Tensor,
    keep_words: Tensor | None,
    keep_factor: float,
    mixed_BTHK: Tensor,
    logsumexp_HBT: Tensor,
    wants_distance: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _gradients(q_HBTK, k_HBSK, v_HBSK, distance_HCBNW, wants_distance)


def _gradients(
    q_HBTK: Tensor,
    k_HBSK: Tensor,
    v_HBSK: Tensor,
    distance_HCBNW: Tensor | None,
    wants_distance: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty and contiguous. The kernels store every element exactly once."""
    d_distance = q_HBTK.new_empty(0)
    if wants_distance:
        assert distance_HCBNW is not None
        d_distance = distance_HCBNW.new_empty(distance_HCBNW.shape)
    d_q, d_k, d_v = (x.new_empty(x.shape) for x in (q_HBTK, k_HBSK, v_HBSK))
    return d_q, d_k, d_v, d_distance


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.keep_factor = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, d_mixed_BTHK: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    wants_distance = ctx.needs_input_grad[3]
    *inputs, mixed_BTHK, logsumexp_HBT = ctx.saved_tensors
    *gradients, d_distance = torch.ops.txl_dist.relative_attention_backward(
        d_mixed_BTHK, *inputs, ctx.keep_factor, mixed_BTHK, logsumexp_HBT, wants_distance
    )
    return (*gradients, d_distance if wants_distance else None, None, None, None)


register_autograd("txl_dist::relative_attention", _backward, setup_context=_save_for_backward)
