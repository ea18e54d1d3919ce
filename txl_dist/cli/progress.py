"""Progress of long commands: a live line on a terminal, plain lines elsewhere, on standard error.

    work_progress    work in bytes, tokens or other units: amount, rate, time left
    running          work without steps: its name, and the time

rich is imported only where a display is drawn: `txl --help` imports this module. `txl train` prints
the lines of rank 0's log, which have step, loss, speed and time left.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from data_pipeline.system.workers import Workers

Show: TypeAlias = Callable[[str, int, int], None]
"""show(label, done, total), to be called often."""

SILENT_SECONDS = 4.0
"""Before each plain line: shorter work is not named."""


@contextmanager
def running(text: str) -> Iterator[None]:
    """Show `text` and the time while the context is open."""
    start = time.monotonic()
    with _shown(lambda: f"{text}: {time.monotonic() - start:.0f} s"):
        yield


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """The unit in which work is measured."""

    name: str
    size: int = 1
    digits: int = 0

    def show(self, amount: float) -> str:
        return f"{amount / self.size:,.{self.digits}f}"


MIB = WorkUnit("MiB", 2**20, 1)
TOKENS = WorkUnit("tokens")


@contextmanager
def work_progress(unit: WorkUnit, workers: "Workers | None" = None) -> Iterator[Show]:
    """Yield `show(label, done, total)`, both in bytes or in units."""
    work = _Work(unit, workers)
    with _shown(work.line):
        yield work.update


class _Work:
    """What is known of the work: its label, amount and rate."""

    def __init__(self, unit: WorkUnit, workers: "Workers | None") -> None:
        self.unit, self.workers, self.label = unit, workers, ""
        self.done = self.total = self._first_done = 0
        self._start = self._began_at = self._updated = time.monotonic()

    def update(self, label: str, done: int, total: int) -> None:
        self._updated = time.monotonic()
        # While `done` does not change, only finished units are looked up: that time is not work.
        if label != self.label or done == self._first_done:
            self.label, self._began_at, self._first_done = label, self._updated, done
        if total:
            self.done, self.total = done, total

    def line(self) -> str:
        """`reading: 60.0 of 90.0 MiB (67%), 10.0 MiB/s, 3 s left`.

        Without a rate of this label: what the work waits for, and the time since it began.
        """
        unit, waited = self.unit, time.monotonic() - self._start
        done, seconds = self.done - self._first_done, self._updated - self._began_at
        has_rate = done > 0 and seconds > 0
        idle = self.workers if not has_rate else None
        if idle and (missing := idle.missing()):
            return f"waiting {waited:,.0f} s for {missing}"
        if not self.total:
            return f"starting, {waited:,.0f} s"
        current, total = self.done, self.total
        if self.workers and unit is MIB:  # with the bytes of units that are not finished
            current = min(current + self.workers.unfinished_bytes(), total)
        amounts = f"{unit.show(current)} of {unit.show(total)} {unit.name} ({current / total:.0%})"
        if not has_rate:
            return f"{self.label}: {amounts}, {waited:,.0f} s"
        rate = done / seconds
        left = (total - self.done) / rate
        return f"{self.label}: {amounts}, {unit.show(rate)} {unit.name}/s, {left:,.0f} s left"


@contextmanager
def _shown(line: Callable[[], str]) -> Iterator[None]:
    """Show `line()` again and again, on standard error, while the context is open."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with Live(
            console=Console(stderr=True),
            get_renderable=lambda: Text(line()),
            refresh_per_second=10,
            transient=True,
        ):
            yield
        return
    ended = threading.Event()

    def print_lines() -> None:
        while not ended.wait(SILENT_SECONDS):
            sys.stderr.write(f"{line()}\n")  # one call, so lines of two threads are not mixed
            sys.stderr.flush()

    thread = threading.Thread(target=print_lines, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
