"""Dropout masks from torch's generator of the device: of `training.dropout_rng: device`, and of
loops of users, which pass no masks.

Unlike masks by lane (training/lane_dropout.py), these depend on the number of ranks, the size of
micro-batches and the kind of device, because a mask is drawn for all rows of a micro-batch. So the
run has another trajectory if one of them changes. A mask is still a function of integers: a resume
on the same ranks and devices continues bit for bit, and no generator is saved.
"""

import hashlib
import math
import struct
from typing import Self

import torch
from torch import Tensor

from txl_dist.model.dropout import KeepBits, Place


class DeviceDropoutMasks:
    """Masks of one micro-batch at one step on one rank."""

    def __init__(self, *, seed: int, step: int = 0, rank: int = 0, micro_batch: int = 0) -> None:
        self._key = struct.pack("<4q", seed, step, rank, micro_batch)

    @classmethod
    def random(cls) -> Self:
        """New masks in every call, which `torch.manual_seed` makes repeatable."""
        return cls(seed=int(torch.randint(2**62, (), device="cpu")))

    def scale(self, x: Tensor, *, rate: float, layer: int, place: Place, by_lane: bool) -> Tensor:
        """0 or 1 / (1 - rate), with the shape of `x`."""
        scale = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return self._draw(scale, rate, layer, place).div_(1 - rate)

    def keep_bits(self, x: Tensor, *, rate: float, layer: int, place: Place) -> KeepBits:
        """Another mask, as bits. Dimension 0 of `x` is the lanes."""
        num_words = math.ceil(x.shape[-1] / 16)
        shape = (*x.shape[:-1], 2 * num_words, 8)
        keep = torch.empty(shape, dtype=torch.uint8, device=x.device)
        self._draw(keep, rate, layer, place)
        bit_values = 2 ** torch.arange(8, dtype=torch.uint8, device=x.device)
        octets = keep.mul_(bit_values).sum(-1, dtype=torch.uint8)
        return KeepBits(octets.view(torch.int16), 1 / (1 - rate))

    def _draw(self, result: Tensor, rate: float, layer: int, place: Place) -> Tensor:
        """`result`, filled with 0 (at `rate`) and 1."""
        generator = torch.Generator(result.device).manual_seed(self._seed_of(layer, place))
        return result.bernoulli_(1 - rate, generator=generator)

    def _seed_of(self, layer: int, place: Place) -> int:
        # Computed again in the backward of activation checkpointing, hence by place, not in order.
        key = self._key + struct.pack("<q", layer) + place.encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little", signed=True)
