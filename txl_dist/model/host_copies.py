"""How the host avoids waiting for a GPU: asynchronous copies, and shapes known in advance."""

import torch
from torch import Tensor


def host_waits_for(device: torch.device) -> bool:
    """Whether the host waits if it reads a value on `device`, such as a number of rows.

    The embedding and the softmax have a form without such reads (docs/decisions/0039).
    """
    return device.type != "cpu"


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
