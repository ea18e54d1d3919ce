"""The C library's memory, kept between steps.

A training step frees and asks for the same few hundred MiB again and again. glibc hands large
blocks back to the system at once and gets them page by page, each page zeroed; on CPUs that took a
tenth of a step and more (docs/experiments.md). GPUs have an allocator of their own.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""glibc accepts no more; blocks above still come from the system one by one."""


def keep_freed_memory() -> bool:
    """From now on, freed memory stays with this process; whether the C library can do that."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library than glibc
        return False
    settings = {_TRIM_THRESHOLD: _NEVER, _MMAP_THRESHOLD: _LARGEST_MMAP_THRESHOLD}
    return all(mallopt(name, value) == 1 for name, value in settings.items())
