"""Workers: map a function over units of work in this process or child processes, and a thread
that runs jobs one after another (`BackgroundQueue`).

If a worker dies (out of memory, killed), its unit is retried once; after the second death an error
names the unit. concurrent.futures is not used: its pool does not report which unit a dead worker
had, and its workers survive a killed parent. `cluster/launcher.py` has the same interface on Ray.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from data_pipeline.errors import TxlError, UnfinishedError
from data_pipeline.system.progress import WorkerStatus, counting_bytes
from data_pipeline.system.signals import end_with_parent, ignore_interrupts, interrupts_blocked

U = TypeVar("U")
R = TypeVar("R")
MAX_DEATHS = 2
"""Workers that one unit may kill. The first death may have another cause."""
_GRACE_SECONDS = 5.0
NICENESS = 14
"""Niceness of the thread: training gets the CPU cores first. While the caller waits for a job, the
cores are free, so a high niceness does not make the wait longer."""


class WorkerDiedError(UnfinishedError):
    """A unit killed MAX_DEATHS workers. `exit_code` None: unknown."""

    def __init__(self, unit: object, exit_code: int | None) -> None:
        cause = "" if exit_code is None else f" with exit code {exit_code}"
        if exit_code is not None and exit_code < 0:
            cause = f" by {signal.Signals(-exit_code).name}"
        self.event = f"the worker for {unit} died{cause}, and so did a second one"
        super().__init__(
            f"{self.event}. Most likely RAM ran out (SIGKILL: see dmesg), or the file makes a "
            "library crash. Run the command again with fewer --workers or without that file; "
            "finished work is kept."
        )


class Workers(Protocol):
    """Runs units of work. `str(unit)` is the unit's name in errors."""

    num_workers: int
    peak_memory_bytes: int
    """The largest resident set size that any worker reported."""

    def map(self, function: Callable[[U], R], units: Iterable[U]) -> Iterator[tuple[int, R]]:
        """Yield (index of the unit, function(unit)) in the order of completion.

        At most 2 * num_workers units are read before their results are yielded. Raises the TxlError
        of a unit unchanged, and WorkerDiedError for a unit that killed MAX_DEATHS workers.
        """

    def status(self) -> list[WorkerStatus]:
        """The busy workers. Any thread may call this and `missing`."""

    def missing(self) -> str:
        """What the workers that have not started are waiting for; "" if there are none."""


class InProcess:
    """Runs every unit in this process, one after the other."""

    num_workers = 1
    peak_memory_bytes = 0

    def map(self, function: Callable[[U], R], units: Iterable[U]) -> Iterator[tuple[int, R]]:
        for number, unit in enumerate(units):
            with counting_bytes():
                result = function(unit)
            yield number, result

    def status(self) -> list[WorkerStatus]:
        return []  # the progress display already shows it

    def missing(self) -> str:
        return ""


class ProcessWorkers:
    """`num_workers` spawned processes, reused by every `map`. The context manager ends them, also
    from another thread: a `map` that is running then raises UnfinishedError.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.peak_memory_bytes = 0
        self._idle: list[_Worker] = []
        self._busy: dict[_Worker, tuple[int, Any]] = {}
        self._num_started = 0
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        workers = [*self._idle, *self._busy]
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.process.join(_GRACE_SECONDS)

    def map(self, function: Callable[[U], R], units: Iterable[U]) -> Iterator[tuple[int, R]]:
        """See `Workers.map`. Closing the generator early kills the workers that are busy."""
        pending = enumerate(units)
        deaths: dict[int, int] = {}
        try:
            self._fill(function, pending)
            while self._busy:
                for worker in self._ready():
                    number, unit = self._busy.pop(worker)
                    try:
                        answer, peak = worker.connection.recv()
                    except (EOFError, OSError):
                        deaths[number] = deaths.get(number, 0) + 1
                        worker.kill()
                        worker.process.join()
                        if self._is_closed:
                            raise UnfinishedError("the workers were closed") from None
                        if deaths[number] == MAX_DEATHS:
                            raise WorkerDiedError(unit, worker.process.exitcode) from None
                        self._start(function, number, unit)
                        continue
                    self._idle.append(worker)
                    self.peak_memory_bytes = max(self.peak_memory_bytes, peak)
                    self._fill(function, pending)
                    if isinstance(answer, Exception):
                        raise answer
                    yield number, answer
        finally:
            for worker in self._busy:
                worker.kill()
            self._busy.clear()

    def status(self) -> list[WorkerStatus]:
        return [
            WorkerStatus(
                f"worker {worker.number} (pid {worker.process.pid})",
                str(unit),
                time.monotonic() - worker.begin,
                worker.counter.value,
            )
            for worker, (_, unit) in self._busy.copy().items()
        ]

    def missing(self) -> str:
        return ""

    def _fill(self, function: Callable[[U], R], pending: Iterator[tuple[int, U]]) -> None:
        for number, unit in islice(pending, self.num_workers - len(self._busy)):
            self._start(function, number, unit)

    def _start(self, function: Callable[[U], R], number: int, unit: U) -> None:
        if self._idle:
            worker = self._idle.pop()
        else:
            worker = _Worker(self._num_started)
            self._num_started += 1
        worker.begin = time.monotonic()
        worker.counter.value = 0
        self._busy[worker] = (number, unit)
        if self._is_closed:
            worker.kill()
        with contextlib.suppress(OSError):  # a dead worker; `map` reads the end of its pipe
            worker.connection.send((function, unit))

    def _ready(self) -> list["_Worker"]:
        by_connection = {worker.connection: worker for worker in self._busy}
        return [by_connection[ready] for ready in wait(list(by_connection))]  # type: ignore[index]


class _Worker:
    """One process and the pipe to it. The kernel closes the pipe when the process dies."""

    def __init__(self, number: int) -> None:
        self.number, self.begin = number, 0.0
        context = multiprocessing.get_context("spawn")
        self.connection, child_connection = context.Pipe()
        self.counter = context.RawValue("q", 0)  # bytes done of the current unit
        self.process = context.Process(
            target=_serve, args=(child_connection, self.counter), daemon=True
        )
        # The tracker first: starting it inside would unblock SIGINT.
        resource_tracker.ensure_running()
        with interrupts_blocked():
            self.process.start()
        # The child must hold the only copy, or its death would not end the stream here.
        child_connection.close()

    def kill(self) -> None:
        self.process.kill()
        self.connection.close()


def peak_memory_bytes() -> int:
    """The peak resident set size of this process."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        # Not getrusage, where a child process starts with the maximum of its parent.
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    import resource

    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _serve(connection: Connection, counter: Any) -> None:
    """The main loop of a worker: run units until the pipe is closed."""
    ignore_interrupts()
    parent = multiprocessing.parent_process()
    if parent is not None:
        end_with_parent(parent.sentinel)
    while True:
        try:
            function, unit = connection.recv()
        except EOFError:
            return
        answer: Any
        try:
            with counting_bytes(counter):
                answer = function(unit)
        except TxlError as error:
            answer = error
        except Exception:
            answer = RuntimeError(f"in a worker, for {unit}:\n{traceback.format_exc()}")
        connection.send((answer, peak_memory_bytes()))


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
