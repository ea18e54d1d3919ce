"""Triton kernels of cross_entropy.py: nats of rows of logits, and the gradient in their place.

Torch has a kernel for each of cast, maximum, exponential, sum and so on, and each reads
and writes all logits. Here forward reads them once; backward reads and writes them once.

The logsumexp is computed online (Milakov & Gimelshein 2018, arXiv:1805.02867, algorithm 3), in
fp32, or float64 for float64 logits. No kernel uses atomics: every element is stored exactly once,
so results repeat bit for bit.

The tests run this with TRITON_INTERPRET=1 on a CPU, against torch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Shapes: R rows, V vocabulary. Tiles have BLOCK_R rows and BLOCK_V columns.

_TILE_ELEMENTS = 4096
"""Of one program: 16 per thread, two loads of 16 bytes in bf16."""
_NUM_WARPS = 8
_VECTOR = 8
"""Elements of 16 bytes in bf16, the most that one instruction loads."""


def write_nats(logit_RV: Tensor, target_R: Tensor, logsumexp_R: Tensor, nats_R: Tensor) -> None:
    """Write `logsumexp_R` and `nats_R`: logsumexp minus the target's logit, 0 where negative."""
    _launch(nats_kernel, logit_RV, target_R, logsumexp_R, nats_R)


def overwrite_with_gradient(
    logit_RV: Tensor, target_R: Tensor, logsumexp_R: Tensor, d_nats_R: Tensor
) -> None:
    """Replace logits by their gradient, for the gradient `d_nats_R` of the nats."""
    _launch(gradient_kernel, logit_RV, target_R, logsumexp_R, d_nats_R.contiguous())


def _launch(kernel: Any, logit_RV: Tensor, *tensors: Tensor) -> None:
    (num_rows, num_columns), (row_stride, column_stride) = logit_RV.shape, logit_RV.stride()
    if num_rows == 0:
        return
    assert column_stride == 1 or num_columns == 1
    assert all(x.is_contiguous() for x in tensors)
    multiple = 1 if row_stride % _VECTOR or num_columns % _VECTOR else _VECTOR
    block_V = min(max(16, triton.next_power_of_2(num_columns)), _TILE_ELEMENTS)
    block_R = _TILE_ELEMENTS // block_V
    grid: tuple[int, ...] = (triton.cdiv(num_rows, block_R), triton.cdiv(num_columns, block_V))
    if kernel is nats_kernel:  # its programs read whole rows
        grid = grid[:1]
    with torch.cuda.device_of(logit_RV):
        kernel[grid](
            logit_RV, *tensors, num_rows, row_stride // multiple, num_columns // multiple,
            MULTIPLE=multiple,
            ACC=tl.float64 if logit_RV.dtype == torch.float64 else tl.float32,
            BLOCK_R=block_R,
            BLOCK_V=block_V,
            num_warps=_NUM_WARPS,
        )  # fmt: skip


LOWEST_LOGIT = tl.constexpr(-1.0e30)
"""The initial maximum of a row. Finite, because of a row with only -inf in its first tile:
exp(-inf - LOWEST_LOGIT) is 0, and exp(-inf + inf) would be NaN."""


# Not specialized: an argument that is 1 or a multiple of 16 would compile the kernel again.
_SIZES = ["num_rows", "row_stride", "num_columns"]


@triton.jit(do_not_specialize=_SIZES)
def nats_kernel(  # type: ignore[no-untyped-def]
    logits, target, logsumexp, nats, num_rows, row_stride, num_columns,
    MULTIPLE: tl.constexpr, ACC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Logsumexp and nats [R] of BLOCK_R rows.

    `row_stride` and `num_columns` are in units of MULTIPLE, by which the compiler knows that they
    are multiples of it, and loads MULTIPLE elements with one instruction.
    """
    row_R = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row_R = row_R < num_rows
    width = num_columns * MULTIPLE
    first_R = logits + row_R * (row_stride * MULTIPLE)
    highest_R = tl.full([BLOCK_R], LOWEST_LOGIT, ACC)
    total_R = tl.zeros([BLOCK_R], ACC)
    for start in range(0, width, BLOCK_V):
        column_V = start + tl.arange(0, BLOCK_V)
        inside_RV = is_row_R[:, None] & (column_V < width)[None, :]
        pointer_RV = first_R[:, None] + column_V[None, :]
        x_RV = tl.load(pointer_RV, mask=inside_RV, other=float("-inf")).to(ACC)
        new_highest_R = tl.maximum(highest_R, tl.max(x_RV, 1))
        part_R = tl.sum(tl.exp(x_RV - new_highest_R[:, None]), 1)
        total_R = total_R * tl.exp(highest_R - new_highest_R) + part_R
        highest_R = new_highest_R
    logsumexp_R = highest_R + tl.log(tl.where(is_row_R, total_R, 1.0))
    target_R = tl.load(target + row_R, mask=is_row_R, other=-1)
    # A target beyond the vocabulary gives NaN.
    is_valid_R = (target_R >= 0) & (target_R < width)
    x_R = tl.load(first_R + target_R, mask=is_valid_R, other=float("nan")).to(ACC)
    nats_R = tl.where(target_R < 0, 0.0, logsumexp_R - x_R)
    tl.store(logsumexp + row_R, logsumexp_R, mask=is_row_R)
    tl.store(nats + row_R, nats_R, mask=is_row_R)


@triton.jit(do_not_specialize=_SIZES)
def gradient_kernel(  # type: ignore[no-untyped-def]
    logits, target, logsumexp, d_nats, num_rows, row_stride, num_columns,
    MULTIPLE: tl.constexpr, ACC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Replaces a tile of logits by (p - 1 at the target) * d_nats.

    Rows whose target is negative get 0. Sizes are those of `nats_kernel`.
    """
    row_R = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row_R = row_R < num_rows
    width = num_columns * MULTIPLE
    column_V = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_RV = is_row_R[:, None] & (column_V < width)[None, :]
    pointer_RV = logits + (row_R * (row_stride * MULTIPLE))[:, None] + column_V[None, :]
    target_R = tl.load(target + row_R, mask=is_row_R, other=-1)
    is_scored_R = target_R >= 0
    logsumexp_R = tl.load(logsumexp + row_R, mask=is_scored_R, other=0.0)
    d_nats_R = tl.load(d_nats + row_R, mask=is_scored_R, other=0.0)
    x_RV = tl.load(pointer_RV, mask=inside_RV & is_scored_R[:, None], other=0.0).to(ACC)
    p_RV = tl.exp(x_RV - logsumexp_R[:, None])
    d_RV = tl.where(column_V[None, :] == target_R[:, None], p_RV - 1.0, p_RV) * d_nats_R[:, None]
    tl.store(pointer_RV, d_RV.to(logits.dtype.element_ty), mask=inside_RV)
