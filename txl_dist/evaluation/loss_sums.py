"""LossSums: what is added up over lanes, micro-batches, ranks and chunks, and divided once.

A mean of means gives a short last batch the weight of a full one; sums do not.
"""

import math
from dataclasses import dataclass, fields
from typing import Self

import torch

from txl_dist.errors import DataError


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over scored targets; `num_bytes` counts the UTF-8 bytes of their text."""

    nats: float = 0.0
    num_tokens: float = 0
    num_bytes: float = 0

    def __add__(self, other: "LossSums") -> "LossSums":
        return LossSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(LossSums)))

    @classmethod
    def of(
        cls, nats_BT: torch.Tensor, target_BT: torch.Tensor, byte_counts_V: torch.Tensor
    ) -> Self:
        """Sums in float64 over the positions whose target is not negative."""
        scored = target_BT[target_BT >= 0]
        return cls(
            nats=nats_BT.detach().double().sum().item(),
            num_tokens=scored.numel(),
            num_bytes=int(byte_counts_V[scored].sum()),
        )

    @property
    def nats_per_token(self) -> float:
        if self.num_tokens <= 0:
            raise DataError("no target was scored, so there is no mean loss; use a longer split")
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """exp of the nats per token; infinity where that is above a float's range."""
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf

    @property
    def bits_per_token(self) -> float:
        return self.nats_per_token / math.log(2)

    @property
    def bits_per_byte(self) -> float:
        """Comparable across tokenizers. The nats of end-of-document tokens count, their bytes
        are none.
        """
        if self.num_bytes <= 0:
            raise DataError("the scored targets have no bytes of text, so no bits per byte")
        return self.nats / (self.num_bytes * math.log(2))
