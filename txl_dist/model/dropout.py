"""Dropout whose draws come from outside, so that they can be the same for any number of ranks.

The model names the place. The caller brings `DropoutMasks` (training: `training/lane_dropout.py`),
or none for evaluation. The model itself has no random state and no train/eval mode.
"""

from typing import Literal, Protocol

from torch import Tensor, nn

Place = Literal[
    "embedding", "distances", "attention weights", "attention", "inner", "feed-forward", "output"
]


class DropoutMasks(Protocol):
    """Masks of one step, a function of (seed, step, lane, layer, place) alone."""

    def scale(self, x: Tensor, *, rate: float, layer: int, place: Place, by_lane: bool) -> Tensor:
        """0 or 1 / (1 - rate), shaped like `x`; `by_lane`: dimension 0 of `x` runs over lanes."""


class Dropout(nn.Module):
    """Zeroes a share `rate` of its input and scales the rest to keep the mean."""

    def __init__(self, rate: float, *, layer: int, place: Place, by_lane: bool = True) -> None:
        super().__init__()
        self.rate, self.layer, self.by_lane = rate, layer, by_lane
        self.place: Place = place

    def forward(self, x: Tensor, draws: DropoutMasks | None) -> Tensor:
        scale = self.scale(x, draws)
        return x if scale is None else x * scale

    def scale(self, x: Tensor, draws: DropoutMasks | None) -> Tensor | None:
        """What `x` is to be multiplied with; none if nothing is dropped. Only its shape counts."""
        if draws is None or self.rate == 0:
            return None
        return draws.scale(
            x, rate=self.rate, layer=self.layer, place=self.place, by_lane=self.by_lane
        )
