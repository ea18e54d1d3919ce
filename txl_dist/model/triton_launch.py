"""Launches the kernels of triton_kernels.py: sizes of tiles, strides and grids.

Imports triton, so triton_attention.py imports this module when a kernel runs.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from txl_dist.model.triton_kernels import (
    forward_kernel,
    key_value_gradient_kernel,
    query_gradient_kernel,
)

# Shapes: B lanes, T segment tokens, S keys, H heads, K d_head


class Tiles(NamedTuple):
    """Size of the tiles of one kernel, and how it runs on a GPU."""

    num_queries: int
    num_keys: int
    num_warps: int
    num_stages: int


_TILES = {
    128: Tiles(64, 32, num_warps=4, num_stages=2),  # bf16: d_head up to 64
    256: Tiles(64, 32, num_warps=8, num_stages=2),  # bf16: 128, fp32: 64
    512: Tiles(32, 32, num_warps=8, num_stages=1),  # bf16: 256, fp32: 128
}


def tiles_of(row_bytes: int) -> Tiles:
    """The tiles for a row of channels of `row_bytes`.

    Chosen from the compiler's output for sm_80 and sm_90: few or no spilled registers, and shared
    memory for two programs per multiprocessor. Never timed on a GPU.
    """
    for most_bytes, tiles in _TILES.items():
        if row_bytes <= most_bytes:
            return tiles
    return Tiles(16, 16, num_warps=4, num_stages=1)


def padded_channels(d_head: int) -> int:
    """Channels of a tile: a power of 2, because triton has no other sizes, and at least 16."""
    return max(16, triton.next_power_of_2(d_head))


def forward(
    q_HBTK: Tensor,
    k_HBSK: Tensor,
    v_HBSK: Tensor,
    distance_HBTS: Tensor | None,
    reach_BT: Tensor,
    keep_BHTS: Tensor | None,
    mixed_BTHK: Tensor,
    logsumexp_HBT: Tensor,
) -> None:
    """Write the last two: see the operator in triton_attention.py."""
    call = _Call.of(q_HBTK, k_HBSK, v_HBSK, distance_HBTS, reach_BT, keep_BHTS)
    call.launch(forward_kernel, q_HBTK.shape[2], mixed_BTHK, logsumexp_HBT)


def backward(
    d_mixed_BTHK: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None],
    outputs: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Write `gradients`: see the operator in triton_attention.py."""
    mixed_BTHK, logsumexp_HBT = outputs
    d_q_HBTK, d_k_HBSK, d_v_HBSK, d_distance = gradients
    mean_HBT = torch.empty_like(logsumexp_HBT)
    call, (num_queries, num_keys) = _Call.of(*inputs), (d_q_HBTK.shape[2], d_k_HBSK.shape[2])
    call.launch(
        query_gradient_kernel, num_queries,
        mixed_BTHK, logsumexp_HBT, d_mixed_BTHK, mean_HBT, d_q_HBTK, d_distance,
        WANTS_DISTANCE_GRADIENT=d_distance.numel() > 0,
    )  # fmt: skip
    call.launch(
        key_value_gradient_kernel, num_keys,
        logsumexp_HBT, d_mixed_BTHK, mean_HBT, d_k_HBSK, d_v_HBSK,
    )  # fmt: skip


class _Call(NamedTuple):
    """The arguments that all kernels share."""

    tensors: tuple[Tensor, ...]
    numbers: tuple[int, ...]
    constants: dict[str, Any]

    @classmethod
    def of(
        cls,
        q_HBTK: Tensor,
        k_HBSK: Tensor,
        v_HBSK: Tensor,
        distance_HBTS: Tensor | None,
        reach_BT: Tensor,
        keep_BHTS: Tensor | None,
    ) -> "_Call":
        num_heads, num_lanes, num_queries, d_head = q_HBTK.shape
        for matrix in (k_HBSK, v_HBSK):
            assert matrix.stride(-1) == 1
        # A kernel without scores by distance or dropout gets, but does not read, another pointer.
        distance_strides = (0, 0, 0) if distance_HBTS is None else distance_HBTS.stride()[:3]
        is_float64 = q_HBTK.dtype == torch.float64
        return cls(
            tensors=(
                q_HBTK,
                k_HBSK,
                v_HBSK,
                q_HBTK if distance_HBTS is None else distance_HBTS,
                reach_BT,
                q_HBTK if keep_BHTS is None else keep_BHTS,
            ),
            numbers=(
                *k_HBSK.stride()[:3],
                *v_HBSK.stride()[:3],
                *distance_strides,
                num_heads,
                num_lanes,
                num_queries,
                k_HBSK.shape[2] - num_queries,
                d_head,
            ),
            constants={
                "HAS_DISTANCE": distance_HBTS is not None,
                "HAS_KEEP": keep_BHTS is not None,
                "ACC": tl.float64 if is_float64 else tl.float32,
                # For fp32: TF32 only if torch's products may use it, else three products of TF32,
                # which are nearly exact. "ieee" does not use the tensor cores and spills registers.
                "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3",
                "BLOCK_K": padded_channels(d_head),
            },
        )

    def launch(self, kernel: Any, num_rows: int, *tensors: Tensor, **constants: Any) -> None:
        """Run a kernel, which divides `num_rows` queries or keys into tiles."""
        q_HBTK = self.tensors[0]
        tiles = tiles_of(self.constants["BLOCK_K"] * q_HBTK.element_size())
        is_by_key = kernel is key_value_gradient_kernel
        block = tiles.num_keys if is_by_key else tiles.num_queries
        grid = (triton.cdiv(num_rows, block), q_HBTK.shape[0] * q_HBTK.shape[1])
        with torch.cuda.device_of(q_HBTK):
            kernel[grid](
                *self.tensors,
                *tensors,
                *self.numbers,
                **self.constants,
                **constants,
                BLOCK_T=tiles.num_queries,
                BLOCK_S=tiles.num_keys,
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
            )
