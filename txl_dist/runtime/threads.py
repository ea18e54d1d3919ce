"""The number of threads of torch, for a part of a program."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

EXACT_THREADS = 1
"""Threads of evaluation on the CPU. The last bit of a matrix product depends on their number, so it
must not depend on the number of workers. More workers use more cores."""


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Compute with this many threads, then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
