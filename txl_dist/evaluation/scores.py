"""LossSums: sums over lanes, micro-batches, ranks and chunks, which are divided once, at the end.

A mean of batch means would give a short last batch the weight of a full one.
"""

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Self

from txl_dist.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over scored targets; `num_bytes` counts the UTF-8 bytes of their text."""

    nats: float = 0.0
    num_tokens: float = 0
    num_bytes: float = 0

    def __add__(self, other: "LossSums") -> "LossSums":
        return LossSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(LossSums)))

    @classmethod
    def of(cls, nats_BT: "Tensor", target_BT: "Tensor", byte_counts_V: "Tensor") -> Self:
        """Sums over the positions whose target is not negative.

        Shapes: B lanes, T segment tokens, V vocabulary. Nats are added in float64, because a
        float32 sum of a long split keeps only about 7 digits.
        """
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
        """exp(nats per token); infinity if that exceeds the range of a float."""
        # math.exp raises OverflowError from about 709.8 on.
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf

    @property
    def bits_per_token(self) -> float:
        return self.nats_per_token / math.log(2)

    @property
    def bits_per_byte(self) -> float:
        """Comparable across tokenizers. End-of-document tokens add nats and no bytes."""
        if self.num_bytes <= 0:
            raise DataError(
                "the scored targets have no bytes of text, so there are no bits per byte"
            )
        return self.nats / (self.num_bytes * math.log(2))
