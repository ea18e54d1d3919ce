"""Triton kernel of `LaneDropoutMasks.scale`: the bits that numpy's Philox gives, on a GPU.

Numpy draws 64-bit words 0, 1, 2, ... of a mask from the counters 1, 2, ...: it increments the
counter first, and each one gives four words. Each word gives four levels of 16 bits, lowest first.
So one counter gives 16 elements of a row, and elements are independent of each other: every program
computes its own ones, and nothing is stored but the result.

The tests run this with TRITON_INTERPRET=1 on a CPU, against numpy.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# Shapes: B rows (lanes), N elements of a row, C counters of a program

_COUNTERS = 128
"""Per program: 2,048 elements."""


def lane_dropout_scale(
    lane_B: Tensor, counter: list[int], threshold: int, shape: list[int], dtype: torch.dtype
) -> Tensor:
    """0 or 65,536 / (65,536 - threshold), of `shape`, on the device of `lane_B`.

    Row b of the result, of B equal parts, belongs to lane `lane_B[b]`. `counter`: seed, step, layer
    and number of the place.
    """
    scale = torch.empty(shape, dtype=dtype, device=lane_B.device)
    num_elements = math.prod(shape) // len(lane_B)
    if num_elements:
        num_programs = triton.cdiv(num_elements, 16 * _COUNTERS)
        _scale_kernel[num_programs, len(lane_B)](
            lane_B, scale, num_elements, *counter, threshold, _factor(threshold, dtype),
            NUM_COUNTERS=_COUNTERS,
        )  # fmt: skip
    return scale


@cache
def _factor(threshold: int, dtype: torch.dtype) -> float:
    """65,536 / (65,536 - threshold), rounded as torch rounds it on a CPU."""
    return float(torch.ones((), dtype=dtype, device="cpu") * (65536 / (65536 - threshold)))


@triton.jit
def _philox(word0, word1, word2, word3, key0, key1):  # type: ignore[no-untyped-def]
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


# Not specialized: an argument that is 1 or a multiple of 16 would compile the kernel again.
@triton.jit(do_not_specialize=["seed", "step", "layer", "place", "threshold"])
def _scale_kernel(  # type: ignore[no-untyped-def]
    lane_B, scale_BN, num_elements, seed, step, layer, place, threshold, factor,
    NUM_COUNTERS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    index_C = tl.program_id(0).to(tl.int64) * NUM_COUNTERS + tl.arange(0, NUM_COUNTERS)
    zero_C = (index_C * 0).to(tl.uint64)
    word0_C, word1_C, word2_C, word3_C = _philox(
        (index_C + 1).to(tl.uint64),
        zero_C + place.to(tl.uint64),
        zero_C + layer.to(tl.uint64),
        zero_C + tl.load(lane_B + row).to(tl.uint64),
        zero_C + seed.to(tl.uint64),
        zero_C + step.to(tl.uint64),
    )
    part_16 = tl.arange(0, 16)[None, :]
    low_C16 = tl.where(part_16 < 4, word0_C[:, None], word1_C[:, None])
    high_C16 = tl.where(part_16 < 12, word2_C[:, None], word3_C[:, None])
    word_C16 = tl.where(part_16 < 8, low_C16, high_C16)
    level_C16 = (word_C16 >> ((part_16 % 4) * 16).to(tl.uint64)).to(tl.uint16).to(tl.int32)
    if scale_BN.dtype.element_ty == tl.float64:  # an argument is fp32
        factor = 65536.0 / (65536 - threshold).to(tl.float64)
    value_C16 = tl.where(level_C16 >= threshold, factor, 0.0).to(scale_BN.dtype.element_ty)
    element_C16 = index_C[:, None] * 16 + part_16
    target = scale_BN + row * num_elements + element_C16
    tl.store(target, value_C16, mask=element_C16 < num_elements)
