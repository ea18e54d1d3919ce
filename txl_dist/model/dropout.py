"""Dropout with masks from the caller, so that they can be the same for any number of ranks.

`txl train` passes `DropoutMasks` (`training/lane_dropout.py`), which apply in either mode of the
model. If a caller passes none, the model does as any nn.Module: in training mode it draws masks
that depend on torch's default generator (`device_dropout.py`), in evaluation mode nothing is
dropped. The model has no random state. See docs/decisions/0004-no-random-state.md.
"""

from typing import Literal, NamedTuple, Protocol

from torch import Tensor, nn

Place = Literal[
    "embedding", "distances", "attention weights", "attention", "inner", "feed-forward", "output"
]


class KeepBits(NamedTuple):
    """A dropout mask with one bit per element, for a kernel that reads tiles of it."""

    words: Tensor
    """int16, shaped like the masked tensor but for its last dimension, which has one word per 16
    elements: element n is kept if bit n % 16 of word n // 16 is 1."""
    factor: float
    """What kept elements are multiplied by, 1 / (1 - rate)."""


class DropoutMasks(Protocol):
    """The masks of one step; each is a function of (seed, step, lane, layer, place)."""

    def scale(self, x: Tensor, *, rate: float, layer: int, place: Place, by_lane: bool) -> Tensor:
        """0 or 1 / (1 - rate), shaped like `x`. `by_lane`: dimension 0 of `x` is the lanes."""

    def keep_bits(self, x: Tensor, *, rate: float, layer: int, place: Place) -> KeepBits:
        """A mask as bits; for masks by lane, that of `scale`. Dimension 0 of `x` is the lanes."""


class Dropout(nn.Module):
    """Sets a fraction `rate` of its input to 0 and scales the rest by 1 / (1 - rate)."""

    def __init__(self, rate: float, *, layer: int, place: Place, by_lane: bool = True) -> None:
        super().__init__()
        self.rate, self.layer, self.by_lane = rate, layer, by_lane
        self.place: Place = place

    def forward(self, x: Tensor, masks: DropoutMasks | None) -> Tensor:
        scale = self.scale(x, masks)
        return x if scale is None else x * scale

    def scale(self, x: Tensor, masks: DropoutMasks | None) -> Tensor | None:
        """The factor for `x`, or None if nothing is dropped. The values of `x` are not used."""
        return None if masks is None or self.rate == 0 else self.draw(x, masks)

    def keep_bits(self, x: Tensor, masks: DropoutMasks | None) -> KeepBits | None:
        """`scale` as bits."""
        return None if masks is None or self.rate == 0 else self.draw_bits(x, masks)

    def draw(self, x: Tensor, masks: DropoutMasks) -> Tensor:
        """The masks for `x`. Separate, because `training.compile` does not compile it."""
        return masks.scale(
            x, rate=self.rate, layer=self.layer, place=self.place, by_lane=self.by_lane
        )

    def draw_bits(self, x: Tensor, masks: DropoutMasks) -> KeepBits:
        """`draw` as bits."""
        return masks.keep_bits(x, rate=self.rate, layer=self.layer, place=self.place)
