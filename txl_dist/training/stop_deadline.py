"""StopDeadline: ends this process in time after a stop request, whatever its main thread does.

The training loop answers a request after its step, by saving. That can take too long: a slow disk,
a step of minutes, a compilation, a collective that waits for a rank that is gone. Schedulers kill
the process after a grace period (Slurm, Kubernetes), and then no message says what was lost. So a
thread ends the process itself:

    before this start has completed a step   immediately; there is nothing to save
    later                                    `grace_seconds` after the request

A checkpoint that is being written then stays incomplete, and is never chosen; the one before it
stays valid. Not covered: native code that holds Python's lock, and a stopped process. A launcher
kills such a rank a few seconds later.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from data_pipeline.system.signals import end_now, print_unbuffered
from txl_dist.checkpoint.directory import CheckpointDirectory, resume_advice
from txl_dist.errors import PreemptedError
from txl_dist.runtime.activity import Activity
from txl_dist.runtime.stop_request import NOTHING_TRAINED, STOPPING, StopRequest

POLL_SECONDS = 0.1
REPORT_SECONDS = 2.0
"""Time limit for the message: on a file system that does not respond, writing it may block."""

log = logging.getLogger("txl_dist.training")


class StopDeadline:
    """Watches for a stop request while the context is open.

    `report` is called with the error that describes what was lost, right before this process ends.
    """

    def __init__(
        self,
        stop: StopRequest,
        activity: Activity,
        *,
        run: Path,
        grace_seconds: float,
        announce: bool = False,
        report: Callable[[PreemptedError], None] = lambda error: None,
    ) -> None:
        self._stop, self._activity, self._run = stop, activity, run
        self._grace_seconds, self._announce, self._report = grace_seconds, announce, report
        self._current_step: Callable[[], int] = lambda: 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stop-deadline", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def begin_steps(self, current_step: Callable[[], int]) -> None:
        """Start-up is over. `current_step` returns the number of the last completed step."""
        self._current_step = current_step

    def _watch(self) -> None:
        while not self._stop:
            if self._closed.wait(POLL_SECONDS):
                return
        # Only this rank may have received the signal; the others may be in a long evaluation.
        self._stop.share()
        if not self._activity.num_steps:
            self._end(lambda: f"{NOTHING_TRAINED}. {resume_advice(self._run)}")
            return
        if self._announce:
            print_unbuffered(STOPPING)
        if not self._closed.wait(self._grace_seconds):
            self._end(self._describe_loss)

    def _describe_loss(self) -> str:
        step, activity = self._current_step(), self._activity.name
        saved = CheckpointDirectory(self._run).steps()
        since = f"the checkpoint of step {saved[-1]}" if saved else "the start"
        num_lost = step - (saved[-1] if saved else 0)
        lost = f"the {num_lost} steps since {since} are lost" if num_lost > 0 else "no step is lost"
        return (
            f"ended training.grace_seconds={self._grace_seconds:g} after the stop request, while "
            f"busy with: {activity}; {lost}. {resume_advice(self._run)}. If a step and a "
            "checkpoint take longer, raise training.grace_seconds, and with it the time that the "
            "scheduler grants"
        )

    def _end(self, describe: Callable[[], str]) -> None:
        def report() -> None:
            error = PreemptedError(describe())
            self._report(error)
            log.warning("%s", error)

        reporter = threading.Thread(target=report, name="stop-report", daemon=True)
        reporter.start()
        reporter.join(REPORT_SECONDS)
        end_now()
