"""Custom autograd functions that avoid copies of large tensors on every device.

- `pack_heads` makes contiguous keys and values [H, B, S, K] of two projections, in one copy in
  each direction. Views and `torch.cat` would take three. Contiguous heads let one product per head
  serve all lanes.
- `in_place_relu` needs no memory for its output and none for its gradient.

They run on every device and with every form of attention, so they are not part of
cpu_attention.py. Their gain was measured on CPUs only.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# Shapes: B lanes, M memory tokens, T segment tokens, N either, S = M + T keys, H heads, K d_head,
# X = 2 H K

Heads = tuple[int, int]
"""H and K."""


def heads_first(key_value_BNX: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Keys and values [H, B, N, K], views of their projection [B, N, X]."""
    keys, values = key_value_BNX.unflatten(-1, (2, *heads)).permute(2, 3, 0, 1, 4).unbind()
    return keys, values


def pack_heads(memory_BMX: Tensor, segment_BTX: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Keys and values [H, B, S, K] of memory and segment, contiguous."""
    keys, values = _PackHeads.apply(memory_BMX, segment_BTX, heads)
    return keys, values


class _PackHeads(Function):
    @staticmethod
    def forward(
        ctx: Any, memory_BMX: Tensor, segment_BTX: Tensor, heads: Heads
    ) -> tuple[Tensor, ...]:
        ctx.heads, ctx.mem_len = heads, memory_BMX.shape[1]
        num_lanes, tgt_len, _ = segment_BTX.shape
        shape = (heads[0], num_lanes, ctx.mem_len + tgt_len, heads[1])
        packed = segment_BTX.new_empty(shape), segment_BTX.new_empty(shape)
        for whole_HBNK, part_HBNK in _parts(packed, memory_BMX, segment_BTX, heads):
            whole_HBNK.copy_(part_HBNK)
        return packed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        num_heads, num_lanes, num_keys, d_head = gradients[0].shape
        width = 2 * num_heads * d_head
        memory_BMX = gradients[0].new_empty(num_lanes, ctx.mem_len, width)
        segment_BTX = gradients[0].new_empty(num_lanes, num_keys - ctx.mem_len, width)
        for whole_HBNK, part_HBNK in _parts(gradients, memory_BMX, segment_BTX, ctx.heads):
            part_HBNK.copy_(whole_HBNK)
        return memory_BMX, segment_BTX, None


def _parts(
    packed: tuple[Tensor, ...], memory_BMX: Tensor, segment_BTX: Tensor, heads: Heads
) -> Iterator[tuple[Tensor, Tensor]]:
    """(view of a packed tensor, view of the projection that it holds), both [H, B, N, K]."""
    mem_len = memory_BMX.shape[1]
    for part_BNX, keys in ((memory_BMX, slice(mem_len)), (segment_BTX, slice(mem_len, None))):
        for whole_HBSK, part_HBNK in zip(packed, heads_first(part_BNX, heads), strict=True):
            yield whole_HBSK[:, :, keys], part_HBNK


def in_place_relu(x: Tensor) -> Tensor:
    """ReLU that overwrites `x`, and in backward the gradient of its output.

    `x` must be the output of a product that nothing else reads. A forward hook on that product sees
    the values after the ReLU, and must not use its gradient.
    """
    return _InPlaceRelu.apply(x)


class _InPlaceRelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.relu_())
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        (gradient,) = gradients  # safe to overwrite: the next product computed it for this node
        return torch.ops.aten.threshold_backward.grad_input(gradient, y, 0, grad_input=gradient)
