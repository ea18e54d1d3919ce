"""Cross-entropy of a linear layer without its whole logits in memory.

    nats_n = log(sum_v exp(logit_nv)) - logit_(n, target n)        logit = x W^T + b

The rows are computed in chunks: forward keeps one float per row, the logarithm of the sum, and
backward computes the logits of a chunk again. This costs one more product of the same size, a third
more for this layer, and bounds the memory by two chunks. Sums over the vocabulary and over
chunks are fp32, or fp64 for fp64 inputs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from txl_dist.model.cluster_targets import IGNORED

# Shapes: N rows, R rows of a chunk, E width, V columns

MAX_LOGITS = 2**27
"""Logits of a chunk: 512 MiB in fp32. Fewer are computed in one piece, without this function."""


def chunked_cross_entropy(
    x_NE: Tensor, weight_VE: Tensor, bias_V: Tensor, target_N: Tensor, *, max_logits: int
) -> Tensor:
    """Nats [N]; 0 where the target is IGNORED. At most `max_logits` logits exist at a time.

    Under autocast, products have its dtype.
    """
    device = x_NE.device.type
    is_cast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_cast else x_NE.dtype
    num_rows = max(1, max_logits // len(weight_VE))
    with torch.autocast(device, enabled=False):
        return _ChunkedCrossEntropy.apply(x_NE, weight_VE, bias_V, target_N, dtype, num_rows)


class _ChunkedCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NE: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor,
        target_N: Tensor,
        dtype: torch.dtype,
        num_rows: int,
    ) -> Tensor:
        layer = weight_VE.to(dtype), bias_V.to(dtype)
        total_N = x_NE.new_empty(len(x_NE), dtype=_at_least_fp32(dtype))
        nats_N = torch.empty_like(total_N)
        for rows in _chunks(len(x_NE), num_rows):
            logit_RV = linear(x_NE[rows].to(dtype), *layer).to(total_N.dtype)
            torch.logsumexp(logit_RV, dim=-1, out=total_N[rows])
            column_R1 = target_N[rows].clamp(min=0)[:, None]
            nats_N[rows] = total_N[rows] - logit_RV.gather(1, column_R1).squeeze(1)
        ctx.save_for_backward(x_NE, weight_VE, bias_V, target_N, total_N)
        ctx.dtype, ctx.num_rows = dtype, num_rows
        return nats_N.masked_fill_(target_N == IGNORED, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NE, weight_VE, bias_V, target_N, total_N = ctx.saved_tensors
        layer = weight_VE.to(ctx.dtype), bias_V.to(ctx.dtype)
        scale_N = gradients[0].masked_fill(target_N == IGNORED, 0)
        d_x_NE = torch.empty_like(x_NE)
        d_weight_VE = torch.zeros_like(weight_VE, dtype=total_N.dtype)
        d_bias_V = torch.zeros_like(bias_V, dtype=total_N.dtype)
        for rows in _chunks(len(x_NE), ctx.num_rows):
            x_RE = x_NE[rows].to(ctx.dtype)
            # The gradient of a row: its probabilities, minus 1 at the target.
            p_RV = linear(x_RE, *layer).to(total_N.dtype).sub_(total_N[rows, None]).exp_()
            column_R1 = target_N[rows].clamp(min=0)[:, None]
            # Not `scatter_add_`, which is refused where algorithms must be deterministic.
            p_RV.scatter_(1, column_R1, p_RV.gather(1, column_R1) - 1)
            p_RV.mul_(scale_N[rows, None])
            d_bias_V += p_RV.sum(0)
            d_logit_RV = p_RV.to(ctx.dtype)
            d_x_NE[rows] = (d_logit_RV @ layer[0]).to(d_x_NE.dtype)
            d_weight_VE += d_logit_RV.t() @ x_RE
        return d_x_NE, d_weight_VE.to(weight_VE.dtype), d_bias_V.to(bias_V.dtype), None, None, None


def _chunks(num: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
