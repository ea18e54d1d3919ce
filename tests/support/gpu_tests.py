"""Where the tests of tests/gpu run: on GPUs, or on the CPU if GPU_TESTS_ON=cpu.

On a CPU they prove nothing about GPUs, only that they are right themselves. So that the first
machine with a GPU does not find their mistakes, `tests/gpu/test_on_cpu.py` runs them so.
"""

import os

import torch

ON_CPU = os.environ.get("GPU_TESTS_ON") == "cpu"
DEVICE = torch.device("cpu" if ON_CPU else "cuda")


def num_devices() -> int:
    """How many ranks can have a device of their own."""
    return 2 if ON_CPU else torch.cuda.device_count()
