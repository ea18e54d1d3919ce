"""Stop signals and the end of a process: the only module that changes how this process handles
SIGTERM, SIGINT, SIGUSR1 and SIGHUP.

Kubernetes, Slurm, systemd and terminals signal every process of a job, and launchers forward what
they receive, so one request reaches a process several times. SIGUSR1 is the notice that Slurm sends
before a time limit; SIGHUP says that the terminal is gone. What a request means for a training run
is defined in `txl_dist/runtime/stop.py`.

Imports only the standard library: a command installs it before its first slow import.
"""

import logging
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
STOPPED_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: stopped on request, the same command resumes the work."""
REPEAT_SECONDS = 3.0
"""Longer than a launcher takes to forward a signal, shorter than a person waits to repeat one."""
_END_OF_LISTENER = 0
"""Written to the wake-up pipe to end the listener; 0 is not the number of any signal."""


def end_now() -> None:
    """End this process with STOPPED_EXIT_CODE, without cleanup. Complete checkpoints stay valid."""
    os._exit(STOPPED_EXIT_CODE)


def print_unbuffered(text: str) -> None:
    """Write a line to standard error, unbuffered: the process may end right after it."""
    os.write(2, f"{text}\n".encode())


class StopSignals:
    """Catches the stop signals while the context is open; true once one has arrived.

    `on_request` is called once, with the number of the first signal. `on_repeat` is called when the
    same signal arrives again after REPEAT_SECONDS. Both are plain attributes, because what a
    request means changes when a process leaves its start-up.

    Handlers can be installed from the main thread only; in other threads the context does nothing.
    """

    # Both callbacks run in a thread of this class. Python runs signal handlers in the main thread
    # only, and not while that thread is in native code: a rank that waits in a collective would
    # not react. Not `sigwait` in a thread: it needs blocked signals, and every child process
    # inherits that mask.

    def __init__(
        self,
        on_request: Callable[[int], None] = lambda number: None,
        on_repeat: Callable[[], None] = end_now,
    ) -> None:
        self.on_request, self.on_repeat = on_request, on_repeat
        self._first_seen: dict[int, float] = {}
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._first_seen)

    @property
    def seconds_since_request(self) -> float:
        """Since the first signal; 0 without one."""
        return time.monotonic() - min(self._first_seen.values(), default=time.monotonic())

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._listener = threading.Thread(target=self._listen, name="stop-signals", daemon=True)
        self._listener.start()
        # Python's C handler writes the number of a signal here, whatever the threads are doing.
        self._previous_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._previous = {
            n: signal.signal(n, _ignore_in_main_thread)
            for n in STOP_SIGNALS
            # nohup ignores SIGHUP, and means it.
            if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        if not self._previous:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        self._previous = {}
        os.write(self._write_end, bytes([_END_OF_LISTENER]))
        self._listener.join()
        os.close(self._read_end)
        os.close(self._write_end)

    def reinstall(self) -> None:
        """Install the handlers once more, after a library has replaced them."""
        if self._previous:
            signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in self._previous:
            signal.signal(number, _ignore_in_main_thread)

    def _listen(self) -> None:
        while True:
            for number in os.read(self._read_end, 64):
                if number == _END_OF_LISTENER:
                    return
                if number in STOP_SIGNALS:
                    self._handle(number)

    def _handle(self, number: int) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        is_request = not self._first_seen
        if number not in self._first_seen:
            # Another signal than the first is not a repeat: Slurm warns with SIGUSR1 and sends
            # SIGTERM at the time limit.
            self._first_seen[number] = time.monotonic()
        elif time.monotonic() - self._first_seen[number] > REPEAT_SECONDS:
            self.on_repeat()
        if is_request:
            self.on_request(number)


def _leave_terminal() -> None:
    """Write to nowhere instead of the terminal, which is gone: every write would be an error."""
    with Path(os.devnull).open("r+b", buffering=0) as nowhere:
        for descriptor in range(3):
            with suppress(OSError):  # closed
                if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                    os.dup2(nowhere.fileno(), descriptor)


def _ignore_in_main_thread(_number: int, _frame: FrameType | None) -> None:
    """Handler that leaves the signal to the listener.

    SIG_IGN would not do: only with a Python handler does the C handler write to the pipe.
    """


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt. Enter it again after ray.init, which takes SIGTERM."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in this thread and its children, which must call `ignore_interrupts`: a spawned
    Python imports for some tenths of a second before its first line can ignore SIGINT.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """Ignore SIGINT in a worker, also one that arrived while it was blocked: Ctrl-C reaches the
    whole process group, and the parent decides.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def block_stop_signals() -> None:
    """Block the stop signals in this thread and in the processes that it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def unblock_stop_signals() -> None:
    """Receive the stop signals in this thread, in a process that has inherited a mask of them."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def exit_without_teardown(code: int) -> NoReturn:
    """Flush logs and standard streams, then end this process; no `atexit` function runs.

    Threads of native libraries (gloo, autograd, Arrow) can outlive the work of a rank. If such a
    thread needs Python while the interpreter shuts down, it is ended inside C++ code, which aborts
    the process: about one finished and saved run in 60 ended with SIGABRT. So a rank skips the
    shutdown of the interpreter; no part of a run depends on it.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed pipe or a full disk: the same exit code
            stream.flush()
    os._exit(code)


def end_with_parent(descriptor: int) -> None:
    """Exit with code 1 as soon as the other end of the pipe `descriptor` is closed.

    The parent holds that end, and the kernel closes it when the parent ends for any reason.
    Returns immediately: a daemon thread waits. The exit runs no `finally` and no `atexit` code.
    `PR_SET_PDEATHSIG` is not used: it signals the end of the thread that started the child, and a
    launcher may start children from short-lived threads.
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
