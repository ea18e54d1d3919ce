"""Dropout masks as a function of (seed, step, lane, layer, place), without any random state.

A run draws the same masks on any number of ranks, in any micro-batches, after any resume and on any
device, because each mask has its own range of a counter-based generator: Philox-4x64-10 (Salmon et
al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). numpy guarantees that the raw stream of a
bit generator does not change between versions; torch has no such guarantee. On GPUs a Triton kernel
computes the same bits (lane_dropout_kernel.py).
"""

from collections.abc import Sequence
from functools import cache
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from txl_dist.model.attention import has_triton
from txl_dist.model.dropout import Place
from txl_dist.model.host_copies import to_device

_PLACES = {place: number for number, place in enumerate(get_args(Place))}
_ALL_LANES = 2**32 - 1
"""Lane number of a mask that all lanes share."""
_LEVELS = 2**16

# Shapes: B rows (lanes)


class LaneDropoutMasks:
    """Masks for the rows of one micro-batch at one step; a padding row has lane -1."""

    def __init__(self, *, seed: int, step: int, lanes: Sequence[int]) -> None:
        self.key = (seed, step)
        self.lanes = lanes
        self._device_lanes: Tensor | None = None

    def scale(self, x: Tensor, *, rate: float, layer: int, place: Place, by_lane: bool) -> Tensor:
        """0 or 1 / (1 - rate), with the shape of `x`. The rate is rounded to 1/65,536."""
        threshold = round(rate * _LEVELS)
        if x.device.type == "cuda" and _has_triton(x.device):
            lanes = self._lanes_on(x.device)
            lane_B = lanes[:-1] if by_lane else lanes[-1:]
            counter = [*self.key, layer, _PLACES[place]]
            return _device_scale(lane_B, counter, threshold, list(x.shape), x.dtype)
        host_lanes = self.lanes if by_lane else (_ALL_LANES,)
        shape = x.shape[1:] if by_lane else x.shape
        rows = np.stack([self._levels(lane, layer, place, shape.numel()) for lane in host_lanes])
        mask = torch.from_numpy(rows >= threshold).view(x.shape).to(x.device)
        return mask.to(x.dtype) * (_LEVELS / (_LEVELS - threshold))

    def _levels(self, lane: int, layer: int, place: Place, count: int) -> np.ndarray:
        """`count` uniform integers in [0, 65536)."""
        # Philox increments the first word of the counter; the other words identify the mask.
        counter = np.array([0, _PLACES[place], layer, lane % 2**32], dtype=np.uint64)
        generator = np.random.Philox(key=np.array(self.key, dtype=np.uint64), counter=counter)
        # Each 64-bit word gives 4 integers of 16 bits, the same on any byte order.
        return generator.random_raw((count + 3) // 4).astype("<u8").view("<u2")[:count]

    def _lanes_on(self, device: torch.device) -> Tensor:
        """Lane numbers of all rows, then _ALL_LANES; copied once per micro-batch."""
        if self._device_lanes is None:
            lanes = torch.tensor([*(lane % 2**32 for lane in self.lanes), _ALL_LANES])
            self._device_lanes = to_device(lanes, device)
        return self._device_lanes


# An operator of torch, so that it has a shape without a GPU too (FakeTensorMode).
@torch.library.custom_op("txl_dist::lane_dropout_scale", mutates_args=(), device_types="cuda")
def _device_scale(
    lane_B: Tensor, counter: list[int], threshold: int, shape: list[int], dtype: torch.dtype
) -> Tensor:
    """`scale` on the GPU of `lane_B`. `counter`: seed, step, layer and number of the place."""
    from txl_dist.training.lane_dropout_kernel import lane_dropout_scale

    return lane_dropout_scale(lane_B, counter, threshold, shape, dtype)


@_device_scale.register_fake
def _(
    lane_B: Tensor, counter: list[int], threshold: int, shape: list[int], dtype: torch.dtype
) -> Tensor:
    return lane_B.new_empty(shape, dtype=dtype)


_has_triton = cache(has_triton)  # asked for every mask of a step
