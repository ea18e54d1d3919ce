"""A child process ends when its parent does, also when the parent was killed by SIGKILL.

The parent holds the other end of a pipe and never writes to it again. The kernel closes it however
the parent ends, so the end of the stream is the only signal that is needed. `PR_SET_PDEATHSIG` is
not used: it follows the thread that started the child, and a launcher may start it from any thread.
"""

import os
import threading


def end_with_parent(descriptor: int) -> None:
    """End this process, in the middle of its work, once the pipe `descriptor` is closed."""
    threading.Thread(
        target=_end_when_closed, args=(descriptor,), name="end-with-parent", daemon=True
    ).start()


def _end_when_closed(descriptor: int) -> None:
    # Not through sys.stdin: its lock would be held while the interpreter shuts down.
    while os.read(descriptor, 4096):
        pass
    os._exit(1)
