"""Workers: map a function over units of work in this process or child processes, and a thread
that runs tasks one after another (`BackgroundQueue`).

If a worker dies (out of RAM, killed), its unit is retried once; after the second death an error
names the unit. concurrent.futures is not used: its pool does not report which unit a dead worker
had, and its workers survive a killed parent. `cluster/launcher.py` has the same interface on Ray.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import Queue
from typing import Any, Protocol, Self, TypeVar

from data_pipeline.errors import TxlError, UnfinishedError
from data_pipeline.system.signals import end_with_parent, ignore_interrupts, interrupts_blocked
from data_pipeline.system.sources import counted_bytes, counting_bytes

U = TypeVar("U")
R = TypeVar("R")
Progress = Callable[[str, int, int], None]
"""progress(label, done_bytes, total_bytes), called often. Work that was finished before this run is
in neither of them, so the total may decrease."""
MAX_DEATHS = 2
"""Workers that one unit may kill. The first death may have another cause."""
_GRACE_SECONDS = 5.0
NICENESS = 14
"""Niceness of the thread: training gets the CPU cores first. While the caller waits for a task, the
cores are free, so a high niceness does not make the wait longer."""


class WorkerDiedError(UnfinishedError):
    """A unit killed MAX_DEATHS workers. `exit_code` None: unknown."""

    def __init__(self, unit: object, exit_code: int | None) -> None:
        cause = "" if exit_code is None else f" with exit code {exit_code}"
        if exit_code is not None and exit_code < 0:
            cause = f" by {signal.Signals(-exit_code).name}"
        self.event = f"the worker for {unit} died{cause}, and so did a second one"
        super().__init__(
            f"{self.event}. Most likely the machine ran out of RAM (SIGKILL: see dmesg), or the "
            "file makes a library crash. Run the command again with fewer --workers or without it; "
            "finished work is kept."
        )


class Workers(Protocol):
    """Runs units of work. `str(unit)` is the unit's name in errors."""

    num_workers: int = 1
    peak_memory_bytes: int = 0
    """The largest resident set size that any worker reported."""

    def map(self, function: Callable[[U], R], units: Iterable[U]) -> Iterator[tuple[int, R]]:
        """Yield (index of the unit, function(unit)) in the order of completion.

        At most 2 * num_workers units are read before their results are yielded. Raises the TxlError
        of a unit unchanged, and WorkerDiedError for a unit that killed MAX_DEATHS workers.
        """

    def unfinished_bytes(self) -> int:
        """Bytes that are done of unfinished units. Any thread may call this and `missing`."""

    def missing(self) -> str:
        """What the workers wait for before any of them can start; "" if they work."""
        return ""


class InProcess(Workers):
    """Runs every unit in this process, one after the other."""

    def map(self, function: Callable[[U], R], units: Iterable[U]) -> Iterator[tuple[int, R]]:
        for number, unit in enumerate(units):
            with counting_bytes():
                result = function(unit)
            yield number, result

    def unfinished_bytes(self) -> int:
        return counted_bytes()


class ProcessWorkers(Workers):
    """`num_workers` spawned processes, reused by every `map`. The context manager ends them, also
    from another thread: a `map` that is running then raises UnfinishedError.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._idle: list[_Worker] = []
        self._busy: dict[_Worker, tuple[int, Any]] = {}
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
                by_connection = {worker.connection: worker for worker in self._busy}
                for connection in wait(list(by_connection)):
                    worker = by_connection[connection]  # type: ignore[index]
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

    def unfinished_bytes(self) -> int:
        return sum(worker.counter.value for worker in self._busy.copy())

    def _fill(self, function: Callable[[U], R], pending: Iterator[tuple[int, U]]) -> None:
        for number, unit in islice(pending, self.num_workers - len(self._busy)):
            self._start(function, number, unit)

    def _start(self, function: Callable[[U], R], number: int, unit: U) -> None:
        worker = self._idle.pop() if self._idle else _Worker()
        worker.counter.value = 0
        self._busy[worker] = (number, unit)
        if self._is_closed:
            worker.kill()
        with contextlib.suppress(OSError):  # a dead worker; `map` reads the end of its pipe
            worker.connection.send((function, unit))


class _Worker:
    """One process and the pipe to it. The kernel closes the pipe when the process dies."""

    def __init__(self) -> None:
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
    """A thread that runs tasks in the order of `submit`.

    After the first task that raises, `error` is its exception, and all later tasks are dropped:
    they would build on the result of the failed one.
    """

    def __init__(self, name: str) -> None:
        self._tasks: Queue[Callable[[], object] | None] = Queue()
        self.progress = 0
        """Increased by long tasks, so that a slow task and one that hangs look different."""
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], object]) -> None:
        """Run `task` after all earlier tasks; returns immediately."""
        self._tasks.put(task)

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until all tasks are done or one has failed; returns whether that is so now."""
        with self._tasks.all_tasks_done:
            return self._tasks.all_tasks_done.wait_for(
                lambda: not self._tasks.unfinished_tasks, timeout_seconds
            )

    def close(self, timeout_seconds: float) -> bool:
        """Run the remaining tasks, then end the thread; False if it still runs after the time."""
        self._tasks.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # refused in some containers
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while task := self._tasks.get():
            try:
                if self.error is None:
                    task()
            except Exception as error:
                self.error = error
            del task  # it may hold large arrays
            self._tasks.task_done()
        self._tasks.task_done()
