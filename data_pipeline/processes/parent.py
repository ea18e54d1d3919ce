"""End a child process when its parent ends, also when the parent is killed by SIGKILL.

The parent holds the other end of a pipe. The kernel closes it when the parent ends for any reason,
and the child reads the end of the stream. `PR_SET_PDEATHSIG` is not used: it signals the end of the
thread that started the child, and a launcher may start children from short-lived threads.
"""

import os
import threading

PARENT_VARIABLE = "TXL_END_WITH_PARENT"
"""Set for a command whose standard input is such a pipe."""


def end_with_parent(descriptor: int) -> None:
    """Exit with code 1 as soon as the other end of the pipe `descriptor` is closed.

    Returns immediately: a daemon thread waits. The exit runs no `finally` and no `atexit` code.
    """
    threading.Thread(
        target=_end_when_closed, args=(descriptor,), name="end-with-parent", daemon=True
    ).start()


def _end_when_closed(descriptor: int) -> None:
    # os.read, not sys.stdin: a thread that blocks in sys.stdin holds its lock, and the interpreter
    # needs that lock to shut down.
    while os.read(descriptor, 4096):
        pass
    os._exit(1)
