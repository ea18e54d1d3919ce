"""StopSignals: SIGTERM, SIGINT and SIGUSR1 as one request to stop.

Kubernetes, Slurm, systemd and terminals signal every process of a job, and launchers forward what
they receive, so that one request reaches a process several times. Repeats within REPEAT_SECONDS
are therefore one request. The same signal again after that is a person, or a script, that does not
want to wait any longer. SIGUSR1 is the notice that Slurm sends before a time limit.

Imports nothing heavy: a command installs it before the first slow import.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

from txl_dist.errors import PreemptedError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
REPEAT_SECONDS = 3.0
"""Longer than a launcher takes to forward a signal, shorter than a person's patience."""
STOPPING = "stopping after this step, then saving; press Ctrl-C again to end now"
NOTHING_TRAINED = "stopped on request before the first step; nothing is lost"


def end_now() -> None:
    """End this process with the exit code of a resumable run; whole checkpoints stay whole."""
    os._exit(PreemptedError.exit_code)


def end_start_up(_number: int) -> None:
    """What a request means before the first step: there is nothing to save."""
    say(NOTHING_TRAINED)
    end_now()


def say(text: str) -> None:
    """Write a line to standard error, unbuffered: the process may end right after it."""
    os.write(2, f"{text}\n".encode())


class StopSignals:
    """Catches the stop signals while the context is open; true once one has arrived.

    `on_request` is called once, with the first signal's number; `on_insist` for each repetition
    after REPEAT_SECONDS. They are plain attributes: what a request means changes when a process
    leaves its start-up. Both run in a thread of this class, because Python runs signal handlers in
    the main thread only, and not while that one is inside native code: a rank that waits in a
    collective would not hear anything. Handlers can be installed from the main thread only;
    elsewhere nothing is caught.
    """

    def __init__(
        self,
        on_request: Callable[[int], None] = lambda number: None,
        on_insist: Callable[[], None] = end_now,
    ) -> None:
        self.on_request, self.on_insist = on_request, on_insist
        self._first_seen: dict[int, float] = {}
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._first_seen)

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._listener = threading.Thread(target=self._listen, name="stop-signals", daemon=True)
        self._listener.start()
        # Python's C handler writes each signal's number there at once, whatever a thread is doing.
        self._previous_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._previous = {n: signal.signal(n, _leave_to_the_listener) for n in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        if not self._previous:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        self._previous = {}
        os.write(self._write_end, bytes([_END]))
        self._listener.join()
        os.close(self._read_end)
        os.close(self._write_end)

    def catch_again(self) -> None:
        """Install the handlers once more, after a library has taken a signal for itself."""
        if self._previous:
            signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in self._previous:
            signal.signal(number, _leave_to_the_listener)

    def _listen(self) -> None:
        while True:
            for number in os.read(self._read_end, 64):
                if number == _END:
                    return
                if number in STOP_SIGNALS:
                    self._handle(number)

    def _handle(self, number: int) -> None:
        is_request = not self._first_seen
        if number not in self._first_seen:
            self._first_seen[number] = time.monotonic()
        elif time.monotonic() - self._first_seen[number] > REPEAT_SECONDS:
            self.on_insist()
        if is_request:
            self.on_request(number)


_END = 0
"""Number of no signal: ends the listener."""


def _leave_to_the_listener(_number: int, _frame: FrameType | None) -> None:
    """Only a handler written in Python makes the C handler write to the wake-up descriptor."""


class StopRequest:
    """True once a stop signal has reached this process, or `stop_file` has appeared.

    Signals can be caught in the main thread only; under Ray the launcher writes the file instead.
    """

    def __init__(self, signals: StopSignals | None = None, stop_file: Path | None = None) -> None:
        self._signals, self._stop_file = signals, stop_file

    def __bool__(self) -> bool:
        return bool(self._signals) or (self._stop_file is not None and self._stop_file.exists())
