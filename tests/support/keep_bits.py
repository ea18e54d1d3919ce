"""Dropout masks as bits (`KeepBits`), from and to tensors of factors, by numpy."""

import numpy as np
import torch
from torch import Tensor

from txl_dist.model.dropout import KeepBits


def pack(keep: Tensor, factor: float) -> KeepBits:
    """What is not 0 is kept."""
    octets = np.packbits((keep != 0).numpy(), axis=-1, bitorder="little")
    padded = np.pad(octets, [*[(0, 0)] * (keep.dim() - 1), (0, octets.shape[-1] % 2)])
    return KeepBits(torch.from_numpy(padded.view("<i2").astype(np.int16)), factor)


def unpack(keep: KeepBits, shape: tuple[int, ...]) -> Tensor:
    """0 or the factor, fp32, of `shape`."""
    octets = keep.words.numpy().astype("<i2").view(np.uint8)
    bits = np.unpackbits(octets, axis=-1, bitorder="little")[..., : shape[-1]]
    return torch.from_numpy(bits.astype(np.float32)).view(shape) * keep.factor
