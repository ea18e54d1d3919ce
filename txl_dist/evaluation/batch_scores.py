"""BatchScores: what a worker returns for one batch of chunks, and what is kept for a resume."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from txl_dist.errors import CheckpointError
from txl_dist.evaluation.breakdown import LossBreakdown
from txl_dist.evaluation.loss_sums import LossSums


class NonFiniteScoreError(CheckpointError):
    """The model overflows on this text, although its weights are finite."""


@dataclass(frozen=True, slots=True)
class BatchScores:
    """The sums of each chunk of a batch, in the order of the chunks."""

    sums: list[LossSums]
    kernel: str = ""
    """The attention function and the device that computed them."""
    breakdown: LossBreakdown | None = field(default=None, compare=False)
    """None if the details are not wanted."""

    def require_finite(self, name: str, *, numbers: Iterable[int]) -> None:
        """Raise NonFiniteScoreError if a chunk's sum is not finite. `name`: model and split.

        `numbers` of the chunks.
        """
        for number, sums in zip(numbers, self.sums, strict=True):
            if not math.isfinite(sums.nats):
                raise NonFiniteScoreError(
                    f"chunk {number} of {name}: the sum of its losses is {sums.nats}, although all "
                    "weights are finite, so the model overflows on this text. Try --precision "
                    "fp32, or an earlier checkpoint: txl checkpoint list RUN"
                )

    def to_json(self) -> dict[str, Any]:
        """Keeps every digit."""
        content: dict[str, Any] = {
            "sums": [[each.nats, each.num_tokens, each.num_bytes] for each in self.sums],
            "kernel": self.kernel,
        }
        if self.breakdown is not None:
            content["breakdown"] = self.breakdown.to_json()
        return content

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Raises KeyError, TypeError or ValueError for content that `to_json` does not write."""
        breakdown = content.get("breakdown")
        return cls(
            sums=[LossSums(*row) for row in content["sums"]],
            kernel=content["kernel"],
            breakdown=None if breakdown is None else LossBreakdown.from_json(breakdown),
        )
