"""Memory: the inputs of each layer for the previous `mem_len` tokens, without gradient.

Its shape is constant. At the start of a stream it holds zeros, which no query sees, because `age`
limits how far back a token may look (visibility.py).

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
    ) -> Self:
        """The memory at the start of streams; ages must start at 0."""
        shape = (num_lanes, mem_len, d_model)
        return cls(tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(n_layer)))

    def after(self, inputs_BTD: Sequence[Tensor]) -> "Memory":
        """The memory after a segment: the last M tokens of [memory ; the layer's inputs]."""
        # detach: gradients stop at the memory (section 3.2 of the paper).
        return Memory(
            tuple(
                _newest(old_BMD, new_BTD.detach())
                for old_BMD, new_BTD in zip(self.layers, inputs_BTD, strict=True)
            )
        )


def _newest(old_BMD: Tensor, new_BTD: Tensor) -> Tensor:
    mem_len, tgt_len = old_BMD.shape[1], new_BTD.shape[1]
    if tgt_len >= mem_len:
        # A copy, because a view would keep the activations of the whole segment in memory.
        return new_BTD[:, tgt_len - mem_len :].clone()
    return torch.cat([old_BMD[:, tgt_len:], new_BTD], dim=1)
