"""Cross-entropy of a linear layer on GPUs, whose logits exist for a limited number of rows.

Kernels (kernels.py) read and write the logits as few times as possible.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from txl_dist.model.devices import define_operator

# Shapes: N rows, R rows of one chunk, E width, V vocabulary

IGNORED = -1
"""Target of a position that is not scored."""
VECTOR_BYTES = 16
"""Rows of another multiple of bytes cannot be loaded by the largest loads of a GPU."""


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Under autocast logits are bf16: 8 bits of precision are too few to sum a vocabulary."""
    return torch.promote_types(dtype, torch.float32)


def linear_cross_entropy(
    x_NE: Tensor,
    weight_VE: Tensor,
    bias_V: Tensor,
    target_N: Tensor,
    *,
    max_logits: int,
) -> Tensor:
    """Nats [N] of a linear layer, in chunks of at most `max_logits` logits; 0 where IGNORED.

        nats_n = log(sum_v exp(logit_nv)) - logit_(n, target n)        logit = x W^T + b

    Forward keeps one float per row, the logarithm of the sum, and the logits of the last chunk.
    Backward starts with these and computes those of the other chunks again, at most a third more
    work for this layer. Gradients of logits take their place, so there is one chunk of logits at a
    time. Sums over the vocabulary and over chunks are fp32, or fp64 for fp64 inputs. Under
    autocast, products have its dtype.
    """
    device = x_NE.device.type
    is_cast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_cast else x_NE.dtype
    chunks = _chunks(len(x_NE), max(1, max_logits // len(weight_VE)))
    with torch.autocast(device, enabled=False):
        return _LinearCrossEntropy.apply(x_NE, weight_VE, bias_V, target_N, chunks, dtype)


def _chunks(num_rows: int, most: int) -> tuple[slice, ...]:
    """Of equal size, or else the last one, whose logits are kept, could be much smaller."""
    size = max(1, math.ceil(num_rows / max(1, math.ceil(num_rows / most))))
    starts = range(0, max(1, num_rows), size)  # one chunk even without rows
    return tuple(slice(start, min(start + size, num_rows)) for start in starts)


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, x_NE: Tensor, weight_VE: Tensor, bias_V: Tensor, target_N: Tensor,
        chunks: tuple[slice, ...], dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """`dtype`: that of the products."""
        ctx.chunks, ctx.input_dtypes = chunks, (x_NE.dtype, weight_VE.dtype, bias_V.dtype)
        ctx.width = x_NE.shape[1]
        x_NE, weight_VE = _with_vectors(x_NE, dtype), _with_vectors(weight_VE, dtype)
        bias_V = bias_V.to(dtype)
        total_N = x_NE.new_empty(len(x_NE), dtype=at_least_fp32(dtype))
        nats_N = torch.empty_like(total_N)
        logit_RV = None
        for rows in chunks:
            del logit_RV  # before the next are computed
            logit_RV = linear(x_NE[rows], weight_VE, bias_V)
            torch.ops.txl_dist.cross_entropy(logit_RV, target_N[rows], total_N[rows], nats_N[rows])
        ctx.save_for_backward(x_NE, weight_VE, bias_V, target_N, total_N)
        ctx.last_logit_RV = logit_RV
        return nats_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NE, weight_VE, bias_V, target_N, total_N = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # They are overwritten; another backward (`retain_graph`) computes them again.
        logit_RV, ctx.last_logit_RV = ctx.last_logit_RV, None
        shape, width = (len(x_NE), ctx.width), ctx.width
        d_x_NE = x_NE.new_empty(shape, dtype=ctx.input_dtypes[0]) if wants_x else None
        d_weight_VE = d_bias_V = None
        for rows in reversed(ctx.chunks):
            if logit_RV is None:
                logit_RV = linear(x_NE[rows], weight_VE, bias_V)
            torch.ops.txl_dist.cross_entropy_backward_(
                logit_RV, target_N[rows], total_N[rows], gradients[0][rows]
            )
            if d_x_NE is not None:
                d_x_NE[rows] = (logit_RV @ weight_VE)[:, :width]
            if wants_weight:
                d_weight_VE = _sum(d_weight_VE, (logit_RV.t() @ x_NE[rows])[:, :width])
            if wants_bias:
                d_bias_V = _sum(d_bias_V, logit_RV.sum(0, dtype=total_N.dtype))
            logit_RV = None  # before the next are computed
        results = zip((d_x_NE, d_weight_VE, d_bias_V), ctx.input_dtypes, strict=True)
        return (*(None if x is None else x.to(dtype) for x, dtype in results), None, None, None)


def _with_vectors(x_NE: Tensor, dtype: torch.dtype) -> Tensor:
    """`x_NE` in a dtype; if that is bf16, with zeros at the end of rows that are not aligned.

    With rows of 820 bytes (d_model 410), products in bf16 load 4 bytes at a time.
    """
    padding = -x_NE.shape[1] % (VECTOR_BYTES // dtype.itemsize)
    if dtype.itemsize > 2 or not padding:
        return x_NE.to(dtype)
    aligned = x_NE.new_zeros(len(x_NE), x_NE.shape[1] + padding, dtype=dtype)
    aligned[:, :-padding] = x_NE
    return aligned


def _sum(before: Tensor | None, more: Tensor) -> Tensor:
    """In fp32 at least, once there is something to add."""
    return more if before is None else before.to(at_least_fp32(before.dtype)).add_(more)


define_operator(
    "cross_entropy",
    "(Tensor logits, Tensor target, Tensor(a!) logsumexp, Tensor(b!) nats) -> ()",
    kernel="txl_dist.model.kernels:write_nats",
    empty_results=lambda *_: None,
)
define_operator(
    "cross_entropy_backward_",
    "(Tensor(a!) logits, Tensor target, Tensor logsumexp, Tensor d_nats) -> ()",
    kernel="txl_dist.model.kernels:overwrite_with_gradient",
    empty_results=lambda *_: None,
)
