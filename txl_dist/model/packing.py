"""Keys and values for attention: heads first, the memory's before the segment's, in one piece.

One product a head serves all lanes only where a head's rows lie together. Each direction is a
single copy; views and concatenation would take three.
"""

from typing import Any

from torch import Tensor
from torch.autograd import Function

# Shapes: B lanes, M memory tokens, T segment tokens, N either, S = M + T keys, H heads, K d_head

Heads = tuple[int, int]
"""H and K."""


def heads_first(key_value_BNX: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Keys and values [H, B, N, K], views of their projection [B, N, 2 H K]."""
    keys, values = key_value_BNX.unflatten(-1, (2, *heads)).permute(2, 3, 0, 1, 4).unbind()
    return keys, values


def pack_heads(memory_BMX: Tensor, segment_BTX: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Keys and values [H, B, S, K] from both projections, [B, M, 2 H K] and [B, T, 2 H K]."""
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
        packed = tuple(segment_BTX.new_empty(shape) for _ in ("keys", "values"))
        _copy_parts(packed, memory_BMX, segment_BTX, ctx, into_parts=False)
        return packed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        num_heads, num_lanes, num_keys, d_head = gradients[0].shape
        width = 2 * num_heads * d_head
        memory_BMX = gradients[0].new_empty(num_lanes, ctx.mem_len, width)
        segment_BTX = gradients[0].new_empty(num_lanes, num_keys - ctx.mem_len, width)
        _copy_parts(gradients, memory_BMX, segment_BTX, ctx, into_parts=True)
        return memory_BMX, segment_BTX, None


def _copy_parts(
    packed: tuple[Tensor, ...],
    memory_BMX: Tensor,
    segment_BTX: Tensor,
    ctx: Any,
    *,
    into_parts: bool,
) -> None:
    places = ((memory_BMX, slice(ctx.mem_len)), (segment_BTX, slice(ctx.mem_len, None)))
    for part_BNX, here in places:
        for whole_HBSK, x_HBNK in zip(packed, heads_first(part_BNX, ctx.heads), strict=True):
            if into_parts:
                x_HBNK.copy_(whole_HBSK[:, :, here])
            else:
                whole_HBSK[:, :, here] = x_HBNK
