"""Workers: one function over many units, here or in processes of our own.

Units are given out one at a time to whoever is free, and results come back as they are done, with
the unit's number. A worker that dies (out of memory, killed) costs one retry of its unit, and its
second death names the unit. Workers end with this process, however it ends.

Not concurrent.futures: its pool cannot say which unit a dead worker had, and its workers outlive a
killed parent. Ray's workers, with the same interface, are in `cluster/preparation.py`.
"""

import contextlib
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from data_pipeline.errors import TxlError, UnfinishedError
from data_pipeline.processes.parent import end_with_parent
from data_pipeline.processes.stop_signals import ignore_interrupts

U = TypeVar("U")
R = TypeVar("R")
MAX_DEATHS = 2
"""Of workers by one unit: one death may have been chance."""
_GRACE_SECONDS = 5.0


class Workers(Protocol):
    """Who does the work. `str(unit)` names it in errors."""

    num_workers: int
    peak_memory_bytes: int
    """The largest resident set that any worker reported."""

    def map(self, function: Callable[[U], R], units: Iterable[U]) -> Iterator[tuple[int, R]]:
        """(number of the unit, function(unit)) of every unit, in the order they are done.

        `units` is read no more than 2 * num_workers ahead. Raises the TxlError of a unit as it is,
        and UnfinishedError for a unit whose worker died twice.
        """


class InProcess:
    """No workers: this process does every unit itself."""

    num_workers = 1
    peak_memory_bytes = 0

    def map(self, function: Callable[[U], R], units: Iterable[U]) -> Iterator[tuple[int, R]]:
        for number, unit in enumerate(units):
            yield number, function(unit)


class ProcessWorkers:
    """`num_workers` spawned processes. Use as a context manager: leaving it ends them."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.peak_memory_bytes = 0
        self._idle: list[_Worker] = []
        self._busy: dict[_Worker, tuple[int, Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        workers = [*self._idle, *self._busy]
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.process.join(_GRACE_SECONDS)

    def map(self, function: Callable[[U], R], units: Iterable[U]) -> Iterator[tuple[int, R]]:
        """See `Workers.map`. An abandoned map's workers are ended."""
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
                        if deaths[number] == MAX_DEATHS:
                            raise died(unit, worker.process.exitcode) from None
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

    def _fill(self, function: Callable[[U], R], pending: Iterator[tuple[int, U]]) -> None:
        while len(self._busy) < self.num_workers:
            try:
                number, unit = next(pending)
            except StopIteration:
                return
            self._start(function, number, unit)

    def _start(self, function: Callable[[U], R], number: int, unit: U) -> None:
        worker = self._idle.pop() if self._idle else _Worker()
        self._busy[worker] = (number, unit)
        with contextlib.suppress(OSError):  # it is dead, which its connection will also say
            worker.connection.send((function, unit))

    def _ready(self) -> list["_Worker"]:
        by_connection = {worker.connection: worker for worker in self._busy}
        return [by_connection[ready] for ready in wait(list(by_connection))]  # type: ignore[index]


class _Worker:
    """One process and the pipe to it. Its death closes the pipe."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        self.process.kill()
        self.connection.close()


def died(unit: object, exit_code: int | None) -> UnfinishedError:
    """The error of a unit whose worker died MAX_DEATHS times; `exit_code` None: not known."""
    how = "" if exit_code is None else f" with exit code {exit_code}"
    if exit_code is not None and exit_code < 0:
        how = f" by {signal.Signals(-exit_code).name}"
    return UnfinishedError(
        f"the worker for {unit} died{how}, and so did the one that tried again. Most likely "
        "memory ran out there (SIGKILL: see dmesg), or the file makes a library fail. Run it again "
        "with fewer --workers, or without that file; finished work is kept."
    )


def peak_memory_bytes() -> int:
    """The largest resident set of this process so far."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        # Not getrusage: a child starts with its parent's maximum there.
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    import resource

    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _serve(connection: Connection) -> None:
    """A worker's life: units until the pipe closes."""
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
            answer = function(unit)
        except TxlError as error:
            answer = error
        except Exception:
            answer = RuntimeError(f"in a worker, for {unit}:\n{traceback.format_exc()}")
        connection.send((answer, peak_memory_bytes()))
