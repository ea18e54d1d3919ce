"""Locks between processes, held by the kernel: a killed process never leaves a stale lock.

`flock` on an open descriptor, of a file or of a directory. A file system without locks counts as
unlocked: a lock prevents mistakes on one host, and no result depends on it. Not the package
filelock: it truncates the lock file while opening it, and would erase the name of the holder that
the error message for the second process shows; and it cannot lock a directory.
"""

import fcntl
import time

POLL_SECONDS = 0.1


def try_lock(descriptor: int) -> bool:
    """Take the exclusive lock of an open file or directory; False if another process holds it.

    The lock ends when the descriptor is closed, also by the end of the process.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def wait_for_lock(descriptor: int, *, timeout_seconds: float) -> bool:
    """`try_lock` until it succeeds; False if it has not within `timeout_seconds`."""
    deadline = time.monotonic() + timeout_seconds
    while not try_lock(descriptor):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
