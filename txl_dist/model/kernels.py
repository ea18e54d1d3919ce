"""Triton kernels of the loss (vocabulary.py) and of the dropout masks by lane.

Nats and gradient of logits: torch has a kernel for each of cast, maximum, exponential, sum and so
on, and each reads and writes all logits. Here forward reads them once; backward reads and writes
them once. The logsumexp is computed online (Milakov & Gimelshein 2018, arXiv:1805.02867, algorithm
3), in fp32, or float64 for float64 logits. No kernel uses atomics: every element is stored exactly
once, so results repeat bit for bit.

Dropout masks have the random bits that numpy's Philox gives. Numpy draws 64-bit words 0, 1, 2, ...
of a mask from the counters 1, 2, ...: it increments the counter first, and each one gives four
words. Each word gives four levels of 16 bits, lowest first. So one counter gives 16 elements of a
row, or one word of their bits. Every program computes its own counters, and only the result is
stored.

The tests run this with TRITON_INTERPRET=1 on a CPU, against torch and numpy.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from txl_dist.model.dropout import keep_factor

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
def nats_kernel(
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
def gradient_kernel(
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


# Shapes: B rows (lanes), N elements of a row, C counters of a program

_COUNTERS = 128
"""Per program: 2,048 elements, or 128 words."""


def lane_dropout_scale(
    lane_B: Tensor, key_2: Tensor, layer: Tensor, place: int, threshold: int,
    shape: Sequence[int], dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """0 or `keep_factor(threshold)`, of `shape`, on the device of `lane_B`.

    Row b of the result, of B equal parts, belongs to lane `lane_B[b]`. `key_2`: seed and step.
    `place`: the number of the place. In fp64, the factor is 65,536 / (65,536 - threshold).
    """
    scale = torch.empty(shape, dtype=dtype, device=lane_B.device)
    return _scaled(scale, None, lane_B, key_2, layer, place, threshold)


def lane_dropout_relu(
    x: Tensor, lane_B: Tensor, key_2: Tensor, layer: Tensor, place: int, threshold: int
) -> Tensor:
    """relu(x) multiplied by the mask, which is not stored; contiguous."""
    x = x.contiguous()
    return _scaled(torch.empty_like(x), x, lane_B, key_2, layer, place, threshold)


def _scaled(
    result: Tensor, x: Tensor | None, lane_B: Tensor, key_2: Tensor, layer: Tensor, place: int,
    threshold: int,
) -> Tensor:  # fmt: skip
    num_elements = result.numel() // len(lane_B)
    if num_elements:
        num_programs = triton.cdiv(num_elements, 16 * _COUNTERS)
        with torch.cuda.device_of(lane_B):
            _scale_kernel[num_programs, len(lane_B)](
                lane_B, key_2, layer, result if x is None else x, result, num_elements, place,
                threshold, keep_factor(threshold, result.dtype), HAS_INPUT=x is not None,
                NUM_COUNTERS=_COUNTERS,
            )  # fmt: skip
    return result


def lane_dropout_bits(
    lane_B: Tensor, key_2: Tensor, layer: Tensor, place: int, threshold: int, shape: Sequence[int]
) -> Tensor:
    """The same mask as bits, the words of `KeepBits`; bits beyond a row's end are random too."""
    *outer, row_size = shape
    row_words = triton.cdiv(row_size, 16)
    words = torch.empty(*outer, row_words, dtype=torch.int16, device=lane_B.device)
    num_words = words.numel() // len(lane_B)
    if num_words:
        num_programs = triton.cdiv(num_words, _COUNTERS)
        with torch.cuda.device_of(lane_B):
            _bits_kernel[num_programs, len(lane_B)](
                lane_B, key_2, layer, words, num_words, row_size, row_words, place, threshold,
                IS_ALIGNED=row_size % 16 == 0, NUM_COUNTERS=_COUNTERS,
            )  # fmt: skip
    return words


@triton.jit
def _philox(word0, word1, word2, word3, key0, key1):
    """Ten rounds of Philox-4x64 on four words of a counter, all uint64."""
    # Not triton.language.random.philox_impl: it cannot be interpreted if another module imported
    # Triton before TRITON_INTERPRET was set.
    for _ in tl.static_range(10):
        before0, before2 = word0, word2
        word0 = tl.umulhi(before2, 0xCA5A826395121157) ^ word1 ^ key0
        word1 = tl.mul(before2, 0xCA5A826395121157, sanitize_overflow=False)
        word2 = tl.umulhi(before0, 0xD2E7470EE14C6C93) ^ word3 ^ key1
        word3 = tl.mul(before0, 0xD2E7470EE14C6C93, sanitize_overflow=False)
        key0 = tl.add(key0, 0x9E3779B97F4A7C15, sanitize_overflow=False)
        key1 = tl.add(key1, 0xBB67AE8584CAA73B, sanitize_overflow=False)
    return word0, word1, word2, word3


@triton.jit
def _random_words(index_C, lane, key_2, layer, place):
    """Words 4 c to 4 c + 3 of a mask, for each index c."""
    seed, step = tl.load(key_2), tl.load(key_2 + 1)
    zero_C = (index_C * 0).to(tl.uint64)
    return _philox(
        (index_C + 1).to(tl.uint64),
        zero_C + place.to(tl.uint64),
        zero_C + tl.load(layer).to(tl.uint64),
        zero_C + lane.to(tl.uint64),
        zero_C + seed.to(tl.uint64),
        zero_C + step.to(tl.uint64),
    )


# Not specialized: an argument that is 1 or a multiple of 16 would compile the kernel again.
_ARGUMENTS = ["place", "threshold"]


@triton.jit(do_not_specialize=_ARGUMENTS)
def _scale_kernel(
    lane_B, key_2, layer, x_BN, result_BN, num_elements, place, threshold, factor,
    HAS_INPUT: tl.constexpr, NUM_COUNTERS: tl.constexpr,
):  # fmt: skip
    """The mask, or with HAS_INPUT its product with relu(x)."""
    row = tl.program_id(1).to(tl.int64)
    index_C = tl.program_id(0).to(tl.int64) * NUM_COUNTERS + tl.arange(0, NUM_COUNTERS)
    word0_C, word1_C, word2_C, word3_C = _random_words(
        index_C, tl.load(lane_B + row), key_2, layer, place
    )
    part_16 = tl.arange(0, 16)[None, :]
    word_C22 = tl.join(tl.join(word0_C, word2_C), tl.join(word1_C, word3_C))
    word_C4 = word_C22.reshape([NUM_COUNTERS, 4])
    shift_4 = (tl.arange(0, 4) * 16).to(tl.uint64)
    level_C44 = (word_C4[:, :, None] >> shift_4[None, None, :]).to(tl.uint16).to(tl.int32)
    level_C16 = level_C44.reshape([NUM_COUNTERS, 16])
    if result_BN.dtype.element_ty == tl.float64:  # an argument is fp32
        factor = 65536.0 / (65536 - threshold).to(tl.float64)
    element_C16 = index_C[:, None] * 16 + part_16
    inside = element_C16 < num_elements
    is_kept, value_C16 = level_C16 >= threshold, factor
    if HAS_INPUT:
        input_C16 = tl.load(x_BN + row * num_elements + element_C16, mask=inside, other=0.0)
        if result_BN.dtype.element_ty != tl.float64:
            input_C16 = input_C16.to(tl.float32)
        # A comparison that NaN passes, as in torch's ReLU.
        is_kept, value_C16 = is_kept & ~(input_C16 <= 0), input_C16 * factor
    value_C16 = tl.where(is_kept, value_C16, 0.0).to(result_BN.dtype.element_ty)
    tl.store(result_BN + row * num_elements + element_C16, value_C16, mask=inside)


@triton.jit
def _keep_bits(index_C, lane, key_2, layer, place, threshold):
    """Bits of elements 16 c to 16 c + 15 of a mask, for each index c."""
    words = _random_words(index_C, lane, key_2, layer, place)
    bits_C = (index_C * 0).to(tl.uint32)
    for number in tl.static_range(16):
        level_C = (words[number // 4] >> (number % 4 * 16)).to(tl.uint16).to(tl.int32)
        bits_C |= (level_C >= threshold).to(tl.uint32) << number
    return bits_C


@triton.jit(do_not_specialize=_ARGUMENTS)
def _bits_kernel(
    lane_B, key_2, layer, words, num_words, row_size, row_words, place, threshold,
    IS_ALIGNED: tl.constexpr, NUM_COUNTERS: tl.constexpr,
):  # fmt: skip
    """Rows of `row_size` elements, each in `row_words` words."""
    lane_row = tl.program_id(1).to(tl.int64)
    lane = tl.load(lane_B + lane_row)
    word_C = tl.program_id(0).to(tl.int64) * NUM_COUNTERS + tl.arange(0, NUM_COUNTERS)
    element_C = word_C // row_words * row_size + word_C % row_words * 16
    bits_C = _keep_bits(element_C // 16, lane, key_2, layer, place, threshold)
    if not IS_ALIGNED:  # a word has elements of two counters
        more_C = _keep_bits(element_C // 16 + 1, lane, key_2, layer, place, threshold)
        bits_C = (bits_C | (more_C << 16)) >> (element_C % 16).to(tl.uint32)
    target = words + lane_row * num_words + word_C
    tl.store(target, bits_C.to(tl.int16), mask=word_C < num_words)
