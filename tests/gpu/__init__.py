"""Tests that need a GPU: `make gpu`. Without one they are skipped. They repeat, on a GPU, what the
other tests prove on CPUs.

With GPU_TESTS_ON=cpu they run on the CPU. That proves nothing about GPUs, only that they are right
themselves, so that the first machine with a GPU does not find their mistakes: `test_on_cpu.py`.
"""

import os

import torch

ON_CPU = os.environ.get("GPU_TESTS_ON") == "cpu"
DEVICE = torch.device("cpu" if ON_CPU else "cuda")


def num_devices() -> int:
    """How many ranks can have a device of their own."""
    return 2 if ON_CPU else torch.cuda.device_count()
