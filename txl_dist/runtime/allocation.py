"""Settings of the C library's allocator for training on CPUs.

A training step frees and allocates the same few hundred MiB repeatedly. By default glibc
returns large blocks to the system and gets them again page by page, and the kernel zeroes each
page: a tenth of a step or more (docs/experiments.md). GPU memory has its own allocator in torch.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
_NEVER = -1


def keep_freed_memory() -> bool:
    """Make this process keep memory that it frees; False if the C library is not glibc."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Blocks in maps of their own would be returned, whatever the thresholds: so there are none.
    settings = {_TRIM_THRESHOLD: _NEVER, _MMAP_MAX: 0}
    return all(mallopt(name, value) == 1 for name, value in settings.items())
