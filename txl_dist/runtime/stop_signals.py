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
from types import FrameType
from typing import Self

from txl_dist.errors import PreemptedError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
REPEAT_SECONDS = 3.0
"""Longer than a launcher takes to forward a signal, shorter than a person's patience."""


def end_now() -> None:
    """End this process with the exit code of a resumable run; whole checkpoints stay whole."""
    os._exit(PreemptedError.exit_code)


class StopSignals:
    """Catches the stop signals while the context is open; true once one has arrived.

    `on_request` is called once, with the first signal's number; `on_insist` for each repetition
    after REPEAT_SECONDS. Both run in the signal handler, so they must be short. They are plain
    attributes: what a request means changes when a process leaves its start-up. Outside the main
    thread, where Python allows no handlers, nothing is caught.
    """

    def __init__(
        self,
        on_request: Callable[[int], None] = lambda number: None,
        on_insist: Callable[[], None] = end_now,
    ) -> None:
        self.on_request, self.on_insist = on_request, on_insist
        self._first_seen: dict[int, float] = {}
        self._previous: dict[int, object] = {}

    def __bool__(self) -> bool:
        return bool(self._first_seen)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {n: signal.signal(n, self._handle) for n in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def catch_again(self) -> None:
        """Install the handlers once more, after a library has taken a signal for itself."""
        for number in self._previous:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        is_first = not self._first_seen
        first_seen = self._first_seen.setdefault(number, time.monotonic())
        if is_first:
            self.on_request(number)
        elif time.monotonic() - first_seen > REPEAT_SECONDS:
            self.on_insist()
