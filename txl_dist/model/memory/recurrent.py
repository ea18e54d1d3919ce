"""Memory: the inputs of each layer for the previous `mem_len` tokens, without gradient.

Its shape is constant. At the start of a stream it holds zeros, which no query sees, because `age`
limits how far back a token may look (visibility.py).

It may be stored in another dtype than the model's (bf16 takes half the bytes), and for a model on a
GPU in the memory of the host. Each layer reads it as the model's dtype and device.

Source: segment-level recurrence, Dai et al. 2019, arXiv:1901.02860, section 3.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

# Shapes: B lanes, T segment tokens, M memory tokens, D d_model


@dataclass(frozen=True, slots=True)
class Memory:
    """One tensor [B, M, D] per layer: `layers[l]` holds inputs of layer l."""

    layers: tuple[Tensor, ...]

    @property
    def mem_len(self) -> int:
        """Tokens per lane, including the zeros before the start of a stream."""
        return self.layers[0].shape[1]

    @classmethod
    def empty(
        cls,
        *,
        n_layer: int,
        num_lanes: int,
        mem_len: int,
        d_model: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        pin: bool = False,
    ) -> Self:
        """The memory at the start of streams; ages must start at 0.

        `pin`: page-locked memory of the host, from which a GPU copies without the processor.
        """
        shape = (num_lanes, mem_len, d_model)
        return cls(
            tuple(
                torch.zeros(shape, dtype=dtype, device=device, pin_memory=pin)
                for _ in range(n_layer)
            )
        )

    def after(self, inputs_BTD: Sequence[Tensor]) -> "Memory":
        """The memory after a segment: the last M tokens of [memory ; the layer's inputs].

        Its dtype and device are those of this memory.
        """
        # detach: gradients stop at the memory (section 3.2 of the paper).
        return Memory(
            tuple(
                _newest(old_BMD, new_BTD.detach())
                for old_BMD, new_BTD in zip(self.layers, inputs_BTD, strict=True)
            )
        )


def _newest(old_BMD: Tensor, new_BTD: Tensor) -> Tensor:
    """The last M tokens of both, in new storage with the dtype and device of `old_BMD`."""
    mem_len, tgt_len = old_BMD.shape[1], new_BTD.shape[1]
    num_new = min(mem_len, tgt_len)
    # Rounded before the copy to the host, which would otherwise take twice the bytes.
    newest_BTD = new_BTD[:, tgt_len - num_new :].to(old_BMD.dtype)
    # Copied even if all of it is new: a view would keep the activations of the whole segment.
    next_BMD = torch.empty_like(old_BMD, pin_memory=old_BMD.is_pinned())
    next_BMD[:, : mem_len - num_new].copy_(old_BMD[:, num_new:])
    next_BMD[:, mem_len - num_new :].copy_(newest_BTD)
    return next_BMD


def read_as(memory_BMD: Tensor, x_BTD: Tensor) -> Tensor:
    """The memory of a layer with the dtype and device of its input; itself if it has them."""
    # In this order: the copy to a GPU has half the bytes if the memory is bf16.
    return memory_BMD.to(x_BTD.device, non_blocking=True).to(x_BTD.dtype)
