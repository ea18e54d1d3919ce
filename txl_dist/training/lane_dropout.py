"""Dropout masks as a function of (seed, step, lane, layer, place), without any random state.

A run draws the same masks on any number of ranks, in any micro-batches and after any resume,
because each mask has its own range of a counter-based generator: Philox-4x64-10 (Salmon et al.
2011, "Parallel random numbers: as easy as 1, 2, 3"). numpy guarantees that the raw stream of a bit
generator does not change between versions; torch has no such guarantee.
"""

from collections.abc import Sequence
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from txl_dist.model.dropout import Place

_PLACES = {place: number for number, place in enumerate(get_args(Place))}
_ALL_LANES = 2**32 - 1
"""Lane number of a mask that all lanes share."""
_LEVELS = 2**16


class LaneDropoutMasks:
    """Masks for the rows of one micro-batch at one step; a padding row has lane -1."""

    def __init__(self, *, seed: int, step: int, lanes: Sequence[int]) -> None:
        self.key = (seed, step)
        self.lanes = lanes

    def scale(self, x: Tensor, *, rate: float, layer: int, place: Place, by_lane: bool) -> Tensor:
        """0 or 1 / (1 - rate), with the shape of `x`. The rate is rounded to 1/65,536."""
        lanes = self.lanes if by_lane else (_ALL_LANES,)
        shape = x.shape[1:] if by_lane else x.shape
        rows = np.stack([self._levels(lane, layer, place, shape.numel()) for lane in lanes])
        threshold = round(rate * _LEVELS)
        mask = torch.from_numpy(rows >= threshold).view(x.shape).to(x.device)
        return mask.to(x.dtype) * (_LEVELS / (_LEVELS - threshold))

    def _levels(self, lane: int, layer: int, place: Place, count: int) -> np.ndarray:
        """`count` uniform integers in [0, 65536)."""
        # Philox increments the first word of the counter; the other words identify the mask.
        counter = np.array([0, _PLACES[place], layer, lane % 2**32], dtype=np.uint64)
        generator = np.random.Philox(key=np.array(self.key, dtype=np.uint64), counter=counter)
        # Each 64-bit word gives 4 integers of 16 bits, the same on any byte order.
        return generator.random_raw((count + 3) // 4).astype("<u8").view("<u2")[:count]
