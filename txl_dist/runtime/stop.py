"""Requests to stop a training run: end in start-up, or save and end after a step, in time.

The signals are caught in `data_pipeline/system/signals.py`. How a request travels from the
signal to the last checkpoint: docs/how_to/stop_a_run.md.

The training loop answers a request after its step, by saving. That can take too long: a slow disk,
a step of minutes, a compilation, a collective that waits for a rank that is gone. Schedulers kill
the process after a grace period (Slurm, Kubernetes), and then no message says what was lost. So a
thread (`StopDeadline`) ends the process itself:

    before this start has completed a step   immediately; there is nothing to save
    later                                    `training.grace_seconds` after the request

A checkpoint that is being written then stays incomplete, and is never chosen; the one before it
stays valid. Not covered: native code that holds Python's lock, and a stopped process. A launcher
kills such a rank a few seconds later.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from data_pipeline.system.signals import StopSignals, end_now, print_unbuffered
from txl_dist.runtime.process import Activity

STOPPING = "stopping after this step, then saving; press Ctrl-C again to end now"
NOTHING_TRAINED = "stopped on request before the first step; nothing is lost"
POLL_SECONDS = 0.1
FILE_SECONDS = 1.0
"""Between two looks at the stop file: each is a request to the file server, by every rank."""
REPORT_SECONDS = 2.0
"""Time limit for the message: on a file system that does not respond, writing it may block."""

log = logging.getLogger("txl_dist.training")


def exit_before_first_step(_number: int) -> None:
    """End immediately with exit code 75: before the first step there is nothing to save."""
    print_unbuffered(NOTHING_TRAINED)
    end_now()


class StopRequest:
    """True once a stop signal has reached this process, or `stop_file` exists.

    All ranks of a launch have the same `stop_file`. Without a launcher of ours (torchrun), the
    ranks agree on it when they have met.
    """

    def __init__(self, signals: StopSignals | None = None, stop_file: Path | None = None) -> None:
        self._signals, self._stop_file = signals, stop_file
        self._next_look = 0.0

    def __bool__(self) -> bool:
        return bool(self._signals) or self._has_file()

    def _has_file(self) -> bool:
        if self._stop_file is None or time.monotonic() < self._next_look:
            return False
        # A file server that fails for a moment has not asked to stop.
        with suppress(OSError):
            if self._stop_file.exists():
                return True
        self._next_look = time.monotonic() + FILE_SECONDS
        return False

    def share_by(self, stop_file: Path) -> None:
        self._stop_file = stop_file
        if self._signals:  # has come before there was a file
            self.share()

    def share(self) -> None:
        """Create `stop_file`, so that the request reaches all ranks."""
        if self._stop_file is not None:
            with suppress(OSError):  # a full disk; the ranks then agree at their next step
                self._stop_file.touch()


class StopDeadline:
    """Watches for a stop request while the context is open. Logs what was lost if it ends this
    process.
    """

    def __init__(
        self,
        stop: StopRequest,
        activity: Activity,
        *,
        grace_seconds: float,
        describe_loss: Callable[[], str],
        advice: Callable[[], str],
        announce: bool = False,
    ) -> None:
        """`describe_loss` says, once a step is completed, which steps are lost if the process ends
        now; `advice` says how to resume. `announce`: confirm a request on standard error.
        """
        self._stop, self._activity = stop, activity
        self._describe_loss, self._advice = describe_loss, advice
        self._grace_seconds, self._announce = grace_seconds, announce
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stop-deadline", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop:
            if self._closed.wait(POLL_SECONDS):
                return
        # Only this rank may have received the signal; the others may be in a long evaluation.
        self._stop.share()
        if not self._activity.num_steps:
            self._end(lambda: f"{NOTHING_TRAINED}. {self._advice()}")
            return
        if self._announce:
            print_unbuffered(STOPPING)
        if not self._closed.wait(self._grace_seconds):
            self._end(
                lambda: (
                    f"ended training.grace_seconds={self._grace_seconds:g} after the stop request, "
                    f"while busy with: {self._activity.name}; {self._describe_loss()}. "
                    f"{self._advice()}. If a step and a checkpoint take longer, raise "
                    "training.grace_seconds, and with it the time that the scheduler grants"
                )
            )

    def _end(self, describe: Callable[[], str]) -> None:
        reporter = threading.Thread(target=lambda: log.warning("%s", describe()), daemon=True)
        reporter.start()
        reporter.join(REPORT_SECONDS)
        end_now()
