"""Dropout masks as a function of (seed, step, lane, layer, place), without any random state.

A run draws the same masks on any number of ranks, in any micro-batches, after any resume and on any
device, because each mask has its own range of a counter-based generator: Philox-4x64-10 (Salmon et
al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). numpy guarantees that the raw stream of a
bit generator does not change between versions; torch has no such guarantee. On GPUs a Triton kernel
computes the same bits (lane_dropout_kernel.py).
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from txl_dist.model.dropout import KeepBits, Place
from txl_dist.model.host_copies import to_device
from txl_dist.model.triton_support import has_triton

_PLACES = {place: number for number, place in enumerate(get_args(Place))}
_ALL_LANES = 2**32 - 1
"""Lane number of a mask that all lanes share."""
_LEVELS = 2**16

# Shapes: B rows (lanes), N elements of a row


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
            lane_B = self._lanes_on(x.device)[:-1] if by_lane else self._lanes_on(x.device)[-1:]
            counter = [*self.key, layer, _PLACES[place]]
            return _device_scale(lane_B, counter, threshold, list(x.shape), x.dtype)
        lanes = self.lanes if by_lane else (_ALL_LANES,)
        keep_BN = self._levels(lanes, layer, place, x.numel() // len(lanes)) >= threshold
        mask = torch.from_numpy(keep_BN).view(x.shape).to(x.device)
        return mask.to(x.dtype) * _factor(threshold)

    def keep_bits(self, x: Tensor, *, rate: float, layer: int, place: Place) -> KeepBits:
        """The same mask as bits. Dimension 0 of `x` is the lanes."""
        threshold = round(rate * _LEVELS)
        if x.device.type == "cuda":  # only forms that need Triton read bits
            counter = [*self.key, layer, _PLACES[place]]
            words = _device_bits(self._lanes_on(x.device)[:-1], counter, threshold, list(x.shape))
        else:
            keep = self._levels(self.lanes, layer, place, x.shape[1:].numel()) >= threshold
            no_padding, padding = [(0, 0)] * (x.dim() - 1), (0, -x.shape[-1] % 16)
            keep = np.pad(keep.reshape(x.shape), [*no_padding, padding])
            octets = np.packbits(keep, axis=-1, bitorder="little")
            words = torch.from_numpy(octets.view("<i2").astype(np.int16))
        return KeepBits(words, _factor(threshold))

    def _levels(self, lanes: Sequence[int], layer: int, place: Place, count: int) -> np.ndarray:
        """`count` uniform integers in [0, 65536) per lane, [B, N]."""
        return np.stack([self._levels_of_lane(lane, layer, place, count) for lane in lanes])

    def _levels_of_lane(self, lane: int, layer: int, place: Place, count: int) -> np.ndarray:
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


def _factor(threshold: int) -> float:
    return _LEVELS / (_LEVELS - threshold)


# Operators of torch, so that they have a shape without a GPU too (FakeTensorMode).
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


@torch.library.custom_op("txl_dist::lane_dropout_bits", mutates_args=(), device_types="cuda")
def _device_bits(lane_B: Tensor, counter: list[int], threshold: int, shape: list[int]) -> Tensor:
    """`keep_bits` on the GPU of `lane_B`. `counter`: seed, step, layer and number of the place."""
    from txl_dist.training.lane_dropout_kernel import lane_dropout_bits

    return lane_dropout_bits(lane_B, counter, threshold, shape)


@_device_bits.register_fake
def _(lane_B: Tensor, counter: list[int], threshold: int, shape: list[int]) -> Tensor:
    return lane_B.new_empty(*shape[:-1], math.ceil(shape[-1] / 16), dtype=torch.int16)


_has_triton = cache(has_triton)  # asked for every mask of a step
