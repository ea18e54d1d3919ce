"""Locks between processes: `flock` on an open file or directory.

The kernel releases the lock when the holder ends, also by SIGKILL, so there are no stale locks. A
file system without locks counts as unlocked, unless the caller decides otherwise: most locks only
prevent mistakes of users on one host.

The package filelock is not used. It truncates the lock file when it opens it, which would erase the
name of the holder that the second process reports, and it cannot lock a directory.
"""

import fcntl
import time

POLL_SECONDS = 0.1


def try_lock(descriptor: int, *, shared: bool = False, if_unsupported: bool = True) -> bool:
    """Take the lock of an open file or directory; False if another process prevents it.

    The lock is exclusive, or `shared` by any number of processes. `if_unsupported` is the result on
    a file system without locks. The lock is released when the descriptor is closed or the process
    ends.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # No lock service (ENOLCK), or NFS, which locks only descriptors that are open for writing
        # (EBADF for a directory).
        return if_unsupported
    return True


def wait_for_lock(descriptor: int, *, timeout_seconds: float) -> bool:
    """Poll `try_lock` until it succeeds; False after `timeout_seconds`."""
    deadline = time.monotonic() + timeout_seconds
    while not try_lock(descriptor):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
