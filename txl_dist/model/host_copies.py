"""Copies from the host to a GPU for which the host does not wait."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; itself if it is there.

    A copy to a GPU goes through page-locked memory, so the host continues immediately. The GPU
    reads the values in the order of its stream; do not change `tensor` afterwards.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    if torch.cuda.is_available():  # not if the GPU is one of torch's fake devices
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
