"""Settings of the C library's allocator for training on CPUs.

A training step frees and allocates the same few hundred MiB again and again. By default glibc
returns large blocks to the system and gets them again page by page, and the kernel zeroes each
page: a tenth of a step or more (docs/experiments.md). GPU memory has its own allocator in torch.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_NEVER = -1
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""glibc accepts no larger value; larger blocks are still returned to the system."""


def keep_freed_memory() -> bool:
    """Make this process keep memory that it frees; False if the C library is not glibc."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_TRIM_THRESHOLD: _NEVER, _MMAP_THRESHOLD: _LARGEST_MMAP_THRESHOLD}
    return all(mallopt(name, value) == 1 for name, value in settings.items())
