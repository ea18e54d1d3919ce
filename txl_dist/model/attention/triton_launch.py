"""The operators of triton.py, by the kernels of triton_kernels.py: tiles, strides and grids."""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from txl_dist.model.attention.triton import empty_gradients, empty_outputs
from txl_dist.model.attention.triton_kernels import (
    forward_kernel,
    key_value_gradient_kernel,
    query_gradient_kernel,
)
from txl_dist.model.encodings import heads_first

# Shapes: B lanes, T segment tokens, S keys, H heads, K d_head


class Tiles(NamedTuple):
    """Size of the tiles of one kernel, and how it runs on a GPU."""

    num_rows: int
    """Rows of one program: keys in `key_value_gradient_kernel`, queries in the others, a multiple
    of NUM_CLASSES. Hopper's matrix instructions need 64."""
    num_columns: int
    """Columns of one iteration of its loop: queries or keys."""
    num_warps: int
    num_stages: int


_KERNELS = ["forward_kernel", "query_gradient_kernel", "key_value_gradient_kernel"]

_TILES = {
    (2, 64): [
        Tiles(64, 32, num_warps=4, num_stages=1),
        Tiles(64, 64, num_warps=4, num_stages=3),
        Tiles(64, 32, num_warps=4, num_stages=1),
    ],
    (2, 128): [
        Tiles(64, 64, num_warps=4, num_stages=2),
        Tiles(64, 64, num_warps=4, num_stages=2),
        Tiles(64, 32, num_warps=4, num_stages=1),
    ],
    (2, 256): [Tiles(32, 32, num_warps=4, num_stages=1)] * 3,
    (4, 64): [
        Tiles(32, 32, num_warps=4, num_stages=2),
        Tiles(32, 32, num_warps=4, num_stages=2),
        Tiles(32, 16, num_warps=4, num_stages=2),
    ],
    (4, 128): [
        Tiles(32, 16, num_warps=8, num_stages=1),
        Tiles(32, 32, num_warps=8, num_stages=1),
        Tiles(32, 16, num_warps=8, num_stages=1),
    ],
}
"""Of each kernel, by bytes per element and the most channels."""

_BEFORE_HOPPER = {
    ("forward_kernel", 2, 128): Tiles(64, 32, num_warps=4, num_stages=3),
    ("query_gradient_kernel", 2, 64): Tiles(64, 32, num_warps=4, num_stages=2),
    ("query_gradient_kernel", 2, 128): Tiles(64, 32, num_warps=8, num_stages=2),
    ("key_value_gradient_kernel", 2, 128): Tiles(32, 32, num_warps=4, num_stages=1),
}
"""Instead, on GPUs with fewer registers for the results of products: others would be spilled."""

_WITHOUT_DISTANCES = {
    ("forward_kernel", 2, 64): Tiles(64, 64, num_warps=4, num_stages=3),
}
"""Instead, without scores by distance."""


def tiles_of(
    kernel: str, element_bytes: int, block_channels: int, *, is_hopper: bool, has_distance: bool
) -> Tiles:
    """The tiles of the kernel of this name, for heads of `block_channels`, padding included.

    Those of 2 bytes and up to 128 channels are, of 11 on an H100, a compromise for the models of
    `benchmarks/gpu.py` (docs/experiments.md, 2026-11-26). The others were never timed; the compiler
    reports few or no spilled registers for sm_80 and sm_90.
    """
    for (num_bytes, most_channels), tiles in _TILES.items():
        if num_bytes == element_bytes and block_channels <= most_channels:
            place = kernel, num_bytes, most_channels
            chosen = tiles[_KERNELS.index(kernel)]
            if not has_distance:
                chosen = _WITHOUT_DISTANCES.get(place, chosen)
            return chosen if is_hopper else _BEFORE_HOPPER.get(place, chosen)
    return Tiles(16, 16, num_warps=4, num_stages=1)


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class Keys(NamedTuple):
    """Keys and values [H, B, N, K]: of memory and segment, or of both as `k1` and `v1`.

    H may be fewer than that of the queries: each serves a group of heads of queries. Their strides
    are any, but 1 between channels.
    """

    k1: Tensor
    v1: Tensor
    k2: Tensor | None = None
    v2: Tensor | None = None

    @classmethod
    def of(cls, q_HBTK: Tensor, first: Tensor, second: Tensor) -> "Keys":
        """Views of the arguments of `triton`."""
        if first.dim() == 4:
            return cls(first, second)
        heads = q_HBTK.shape[0], q_HBTK.shape[3]
        return cls(*heads_first(first, heads), *heads_first(second, heads))


class Inputs(NamedTuple):
    """See the operators in attention/triton.py."""

    q_HBTK: Tensor
    keys: Keys
    distance_HCBNW: Tensor | None
    reach_BT: Tensor
    keep_words: Tensor | None
    keep_factor: float


def relative_attention(*inputs: Any) -> tuple[Tensor, Tensor]:
    """The operator of this name."""
    q_HBTK, first, second, *options = inputs
    outputs = empty_outputs(*inputs)
    forward(Inputs(q_HBTK, Keys.of(q_HBTK, first, second), *options), outputs)
    return outputs


def relative_attention_backward(d_mixed_BTHK: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    """The operator of this name."""
    q_HBTK, first, second, *options, mixed_BTHK, logsumexp_HBT, _ = saved
    d_q, d_first, d_second, d_distance = gradients = empty_gradients(d_mixed_BTHK, *saved)
    backward(
        d_mixed_BTHK.contiguous(),
        Inputs(q_HBTK, Keys.of(q_HBTK, first, second), *options),
        (mixed_BTHK, logsumexp_HBT),
        (d_q, Keys.of(d_q, d_first, d_second), d_distance),
    )
    return gradients


def forward(inputs: Inputs, outputs: tuple[Tensor, Tensor]) -> None:
    """Write `outputs`: the weighted sums of values, and the binary logsumexp."""
    _Call.of(inputs).launch(forward_kernel, outputs[0].shape[1], *outputs)


def backward(
    d_mixed_BTHK: Tensor,
    inputs: Inputs,
    outputs: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Keys, Tensor],
) -> None:
    """Write `gradients`: of q, keys and values, and the scores by distance, which may be empty.

    Those of keys and values have the strides of these.
    """
    (mixed_BTHK, logsumexp_HBT), call = outputs, _Call.of(inputs)
    d_q, (d_k1, d_v1, d_k2, d_v2), d_distance = gradients
    mean_HBT = torch.empty_like(logsumexp_HBT)
    call.launch(
        query_gradient_kernel, d_q.shape[2],
        mixed_BTHK, logsumexp_HBT, d_mixed_BTHK, mean_HBT, d_q, d_distance,
        WANTS_DISTANCE_GRADIENT=d_distance.numel() > 0,
    )  # fmt: skip
    call.launch(
        key_value_gradient_kernel, call.num_keys,
        logsumexp_HBT, d_mixed_BTHK, mean_HBT,
        d_k1, d_v1, d_k1 if d_k2 is None else d_k2, d_v1 if d_v2 is None else d_v2,
    )  # fmt: skip


class _Call(NamedTuple):
    """The arguments that all kernels share."""

    tensors: tuple[Tensor, ...]
    numbers: tuple[int, ...]
    num_kv_heads: int
    num_keys: int
    split: int
    """How many of them are in the first matrix."""
    constants: dict[str, Any]

    @classmethod
    def of(cls, inputs: Inputs) -> "_Call":
        q_HBTK, (k1, v1, k2, v2), distance_HCBNW, reach_BT, keep_words, keep_factor = inputs
        num_heads, num_lanes, num_queries, d_head = q_HBTK.shape
        split = k1.shape[2]
        num_keys = split if k2 is None else split + num_queries
        matrices = k1, v1, k1 if k2 is None else k2, v1 if v2 is None else v2
        for matrix in (*matrices, distance_HCBNW):
            assert matrix is None or matrix.stride(-1) == 1
        # A kernel without scores by distance or dropout gets, but does not read, another pointer.
        distance_strides: tuple[int, ...] = (0, 0, 0, 0)
        num_columns = 0
        if distance_HCBNW is not None:
            distance_strides, num_columns = distance_HCBNW.stride()[:4], distance_HCBNW.shape[-1]
        is_float64 = q_HBTK.dtype == torch.float64
        return cls(
            tensors=(
                q_HBTK,
                *matrices,
                q_HBTK if distance_HCBNW is None else distance_HCBNW,
                reach_BT,
                q_HBTK if keep_words is None else keep_words,
            ),
            numbers=(
                *(stride for matrix in matrices for stride in matrix.stride()[:3]),
                *distance_strides,
                num_heads,
                num_lanes,
                num_queries,
                num_keys - num_queries,
                d_head,
                num_columns,
            ),
            num_kv_heads=len(k1),
            num_keys=num_keys,
            split=split,
            constants={
                "GROUP": num_heads // len(k1),
                "HAS_DISTANCE": distance_HCBNW is not None,
                "HAS_KEEP": keep_words is not None,
                # A constant, because triton passes numbers that are arguments as fp32.
                "KEEP_FACTOR": keep_factor,
                "ACC": tl.float64 if is_float64 else tl.float32,
                # For fp32: TF32 only if torch's products may use it, else three products of TF32,
                # which are nearly exact. "ieee" does not use the tensor cores and spills registers.
                "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3",
                # A power of 2, because triton has no other sizes of tiles, and at least 16.
                "BLOCK_K": max(16, triton.next_power_of_2(d_head)),
            },
        )

    def launch(self, kernel: Any, num_rows: int, *tensors: Tensor, **constants: Any) -> None:
        """Run a kernel, which divides `num_rows` queries or keys into tiles."""
        q_HBTK = self.tensors[0]
        size, is_hopper = q_HBTK.element_size(), _is_hopper(q_HBTK.device)
        tiles = tiles_of(
            kernel.__name__,
            size,
            self.constants["BLOCK_K"],
            is_hopper=is_hopper,
            has_distance=self.constants["HAS_DISTANCE"],
        )
        blocks = {"BLOCK_T": tiles.num_rows, "BLOCK_S": tiles.num_columns}
        num_heads, num_lanes = q_HBTK.shape[:2]
        if kernel is key_value_gradient_kernel:
            num_heads = self.num_kv_heads
            blocks = {"BLOCK_T": tiles.num_columns, "BLOCK_S": tiles.num_rows}
        if self.split == self.num_keys:
            constants["SPLIT"] = 0
        else:
            constants["SPLIT"] = 2 if self.split % blocks["BLOCK_S"] else 1
        # Heads and lanes on axes of their own: those after the first end at 65,535.
        assert num_lanes < 2**16, f"{num_lanes:,} lanes for {kernel.__name__}, at most 65,535"
        grid = (triton.cdiv(num_rows, tiles.num_rows), num_lanes, num_heads)
        with torch.cuda.device_of(q_HBTK):
            kernel[grid](
                *self.tensors,
                *tensors,
                *self.numbers,
                **self.constants,
                **constants,
                **blocks,
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
            )
