"""How many GPUs this process may use, without importing torch where there are none."""

from pathlib import Path

DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Device files of NVIDIA, of NVIDIA under WSL, and of AMD."""


def num_gpus() -> int:
    """GPUs that torch can use."""
    if not any(Path(name).exists() for name in DRIVER_FILES):
        return 0
    import torch

    return torch.cuda.device_count()
