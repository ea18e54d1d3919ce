"""Progress of work in bytes or tokens, on standard error: amount, rate, and what each worker does.

    work_progress(MIB, workers) -> progress(phase, done, total)

On a terminal a bar and a line for each busy worker, elsewhere a line every few seconds, and the
list of workers twice a minute. For preparation, verification, upload and evaluation.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data_pipeline.system.progress import counted_bytes

if TYPE_CHECKING:
    from data_pipeline.system.workers import Workers

_SECONDS_BETWEEN_LINES = 4.0
_SECONDS_BETWEEN_WORKERS = 30.0
"""Where output is plain lines: between the lists of workers."""
_MAX_WORKERS = 12
"""Lines of such a list. The workers that have been busy for longest are in it."""


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """The unit in which work is measured."""

    name: str
    size: int
    digits: int

    def show(self, amount: float) -> str:
        return f"{amount / self.size:,.{self.digits}f}"


MIB = WorkUnit("MiB", 2**20, 1)
TOKENS = WorkUnit("tokens", 1, 0)


@contextmanager
def work_progress(
    unit: WorkUnit, workers: "Workers | None" = None
) -> Iterator[Callable[[str, int, int], None]]:
    """Yield `progress(phase, done, total)`, both in bytes or tokens, to be called often."""
    with _terminal_display(unit, workers) if sys.stderr.isatty() else _lines(unit, workers) as show:
        yield show


@contextmanager
def _terminal_display(
    unit: WorkUnit, workers: "Workers | None"
) -> Iterator[Callable[[str, int, int], None]]:
    from rich import progress as rich_progress
    from rich.console import Console, RenderableType
    from rich.text import Text

    class Display(rich_progress.Progress):
        """The bar, and a line for each busy worker below it."""

        def get_renderables(self) -> "Iterator[RenderableType]":
            for each in self.tasks:
                self.update(each.id, completed=_with_current(finished, each.total, unit, workers))
            yield self.make_tasks_table(self.tasks)
            yield Text("\n".join(f"  {line}" for line in worker_lines(workers)), no_wrap=True)

    is_bytes, finished = unit is MIB, 0
    columns: list[Any] = [rich_progress.TextColumn("{task.description}"), rich_progress.BarColumn()]
    columns.append(
        rich_progress.DownloadColumn() if is_bytes else rich_progress.TaskProgressColumn()
    )
    columns.append(rich_progress.TransferSpeedColumn() if is_bytes else _rate_column(unit))
    columns.append(rich_progress.TimeRemainingColumn())
    with Display(*columns, console=Console(stderr=True), transient=True) as bar:
        task, current_phase = bar.add_task(""), ""

        def show(phase: str, done: int, total: int) -> None:
            nonlocal current_phase, finished
            finished = done
            if phase != current_phase:
                # A new phase starts a new speed measurement, from the work already done.
                bar.reset(task, completed=done, total=total)
                current_phase = phase
            bar.update(task, description=phase, completed=done, total=total)

        yield show


def _with_current(done: int, total: float | None, unit: WorkUnit, workers: "Workers | None") -> int:
    """`done` with the bytes that are done of the units that workers are at, at most `total`."""
    if workers is None or unit is not MIB:
        return done
    current = counted_bytes() + sum(status.done_bytes for status in workers.status())
    return min(done + current, int(total or 0))


def _rate_column(unit: WorkUnit) -> Any:
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("?" if speed is None else f"{unit.show(speed)} {unit.name}/s")

    return RateColumn()


@contextmanager
def _lines(unit: WorkUnit, workers: "Workers | None") -> Iterator[Callable[[str, int, int], None]]:
    printer = _LinePrinter(unit)
    if workers is None:
        yield printer.show
        return
    # While all workers are busy with long units, or none has started, `show` is not called.
    ended = threading.Event()

    def print_workers() -> None:
        while not ended.wait(1.0):
            printer.show_workers(workers)
            printer.repeat(workers)

    thread = threading.Thread(target=print_workers, name="progress", daemon=True)
    thread.start()
    try:
        yield printer.show
    finally:
        ended.set()
        thread.join()


def worker_lines(workers: "Workers | None") -> list[str]:
    """What each busy worker is doing, and what the missing ones wait for."""
    if workers is None:
        return []
    busy = sorted(workers.status(), key=lambda status: -status.busy_seconds)
    lines = [str(status) for status in busy[:_MAX_WORKERS]]
    if len(busy) > _MAX_WORKERS:
        lines.append(f"and {len(busy) - _MAX_WORKERS} more workers, busy for less time")
    if missing := workers.missing():
        lines.append(f"waiting for {missing}")
    return lines


class _LinePrinter:
    """Prints a line every few seconds. Two threads use it."""

    def __init__(self, unit: WorkUnit) -> None:
        self._unit = unit
        self._phase, self._phase_start, self._first_done = "", 0.0, 0
        self._begin = self._last_line = self._last_workers = time.monotonic()
        self._last_print, self._done, self._total = self._begin, 0, 0

    def show(self, phase: str, done: int, total: int) -> None:
        """A callback like that of `work_progress`."""
        seconds, unit = time.monotonic(), self._unit
        # While `done` does not change, only finished units are looked up: that time is not work.
        if phase != self._phase or done == self._first_done:
            self._phase, self._phase_start, self._first_done = phase, seconds, done
        if total:
            self._done, self._total = done, total
        if seconds - self._last_line < _SECONDS_BETWEEN_LINES or not total:
            return
        self._last_line = seconds
        speed = ""
        if done > self._first_done and seconds > self._phase_start:
            rate = (done - self._first_done) / (seconds - self._phase_start)
            speed = f", {unit.show(rate)} {unit.name}/s, {(total - done) / rate:,.0f} s left"
        self._print(f"{phase}: {self._amount(done)}{speed}")

    def _amount(self, done: int) -> str:
        total, unit = self._total, self._unit
        return f"{unit.show(done)} of {unit.show(total)} {unit.name} ({done / total:.0%})"

    def repeat(self, workers: "Workers | None" = None) -> None:
        """Print the amount if no line was printed for some seconds.

        While all workers are busy with long units, `show` is not called.
        """
        seconds = time.monotonic()
        if seconds - self._last_print >= _SECONDS_BETWEEN_LINES:
            done = _with_current(self._done, self._total, self._unit, workers)
            phase = f"{self._phase}: {self._amount(done)}" if self._total else "starting"
            self._print(f"{phase}, {seconds - self._begin:.0f} s")

    def show_workers(self, workers: "Workers") -> None:
        """Print what the workers are doing, or wait for, if the last list is old enough."""
        seconds = time.monotonic()
        is_waiting = not workers.status() and workers.missing()
        wait_seconds = 2 * _SECONDS_BETWEEN_LINES if is_waiting else _SECONDS_BETWEEN_WORKERS
        if seconds - self._last_workers < wait_seconds:
            return
        self._last_workers = seconds
        if is_waiting:
            self._print(f"waiting {seconds - self._begin:,.0f} s for {workers.missing()}")
            return
        for line in worker_lines(workers):
            self._print(f"  {line}")

    def _print(self, line: str) -> None:
        self._last_print = time.monotonic()
        sys.stderr.write(f"{line}\n")  # one call, so lines of two threads are not mixed
        sys.stderr.flush()
