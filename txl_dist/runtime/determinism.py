"""`training.deterministic`: operations on GPUs that give the same bits in every run.

Some of torch's CUDA kernels add with atomics, in an order that changes. cuBLAS needs a workspace of
a fixed size for reproducible products, and NCCL has to add in the same order, so its algorithm is
fixed too. Operations on CPUs are reproducible in any case.

Source: https://docs.pytorch.org/docs/2.13/notes/randomness.html
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
"""Read when a process first uses cuBLAS and NCCL. Values that are set already stay."""


@contextmanager
def deterministic(*, enabled: bool) -> Iterator[None]:
    """Use reproducible operations. Enter it before the process uses a GPU.

    An operation without a reproducible form raises RuntimeError, which names it.
    """
    if not enabled:
        yield
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    before = torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Filling new tensors costs a pass over each; every element is written before it is read.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = fills
