"""BackgroundQueue: runs jobs one after another in a thread, and keeps their first error."""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable

NICENESS = 14
"""Niceness of the thread: training gets the CPU cores first. While the caller waits for a job, the
cores are free, so a high niceness does not make the wait longer."""


class BackgroundQueue:
    """A thread that runs jobs in the order of `submit`.

    After the first job that raises, `error` is its exception, and all later jobs are dropped: they
    would build on the result of the failed one.
    """

    def __init__(self, name: str) -> None:
        self._condition = threading.Condition()
        self._jobs: deque[Callable[[], object]] = deque()
        self._is_running = self._is_closed = False
        self.progress = 0
        """Increased by long jobs, so that a job that is slow and one that hangs look different."""
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], object]) -> None:
        """Run `job` after all earlier jobs; returns immediately."""
        with self._condition:
            if self.error is None:
                self._jobs.append(job)
                self._condition.notify_all()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until all jobs are done or one has failed; returns whether that is so now."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._is_busy, timeout_seconds)

    @property
    def _is_busy(self) -> bool:
        return self._is_running or bool(self._jobs)

    def close(self, timeout_seconds: float) -> bool:
        """Run the remaining jobs, then end the thread; False if it still runs after the time."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # refused in some containers
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            with self._condition:
                self._condition.wait_for(lambda: bool(self._jobs) or self._is_closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._is_running = True
            error = None
            try:
                job()
            except Exception as exception:
                error = exception
            del job  # it may hold large arrays
            with self._condition:
                self._is_running = False
                if error is not None:
                    self.error = error
                    self._jobs.clear()
                self._condition.notify_all()
