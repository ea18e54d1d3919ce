"""`training.dropout_rng: device`: dropout masks from torch's generator of the rank's device.

Unlike masks by lane (lane_dropout.py), these depend on the number of ranks, the size of
micro-batches and the kind of device, because a mask is drawn for all rows of a micro-batch. So the
run has another trajectory if one of them changes. A mask is still a function of integers: a resume
on the same ranks and devices continues bit for bit, and no generator is saved.
"""

import hashlib
import struct

import torch
from torch import Tensor

from txl_dist.model.dropout import Place


class DeviceDropoutMasks:
    """Masks of one micro-batch at one step on one rank."""

    def __init__(self, *, seed: int, step: int, rank: int, micro_batch: int) -> None:
        self._key = struct.pack("<4q", seed, step, rank, micro_batch)

    def scale(self, x: Tensor, *, rate: float, layer: int, place: Place, by_lane: bool) -> Tensor:
        """0 or 1 / (1 - rate), with the shape of `x`."""
        generator = torch.Generator(x.device).manual_seed(self._seed_of(layer, place))
        scale = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return scale.bernoulli_(1 - rate, generator=generator).div_(1 - rate)

    def _seed_of(self, layer: int, place: Place) -> int:
        # Computed again in the backward of activation checkpointing, hence by place, not in order.
        key = self._key + struct.pack("<q", layer) + place.encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little", signed=True)
