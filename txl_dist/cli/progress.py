"""Progress of long commands: a live line on a terminal, plain lines elsewhere.

    run_progress     training: the lines of rank 0's log, on standard output
    work_progress    work in bytes, tokens or other units: amount, rate, time left
    running          work without steps: its name, and the time

rich is imported only where a display is drawn: `txl --help` imports this module.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from data_pipeline.system.workers import Workers

Show: TypeAlias = Callable[[str, int, int], None]
"""show(label, done, total), to be called often."""

SILENT_SECONDS = 4.0
"""Before each plain line: shorter work is not named."""
BAR_COLUMNS = 20


@contextmanager
def run_progress(run: Path, num_steps: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield `on_line(line)`, to be called with every line of a run's log.

    The lines are printed. On a terminal a row below them has a bar, the step, the loss, the speed
    and the time left, as metrics.jsonl says.
    """
    if quiet:
        yield lambda line: None
        return
    if not sys.stdout.isatty():
        yield lambda line: print(line, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from txl_dist.analysis.run_status import last_values, progress_text
    from txl_dist.tracking.journal import JOURNAL

    columns = BarColumn(BAR_COLUMNS), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=(console := Console())) as display:
        row = display.add_task("starting", total=num_steps)

        def on_line(line: str) -> None:
            # The terminal breaks long lines: a line that is copied stays one.
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            if values := last_values(run / JOURNAL):
                text = ", ".join(progress_text(values, num_steps))
                display.update(row, completed=values.get("step", 0), description=text)

        yield on_line


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

    @property
    def current(self) -> int:
        """`done`, with the bytes of the units that workers are at, at most `total`."""
        if self.workers is None or self.unit is not MIB:
            return self.done
        return min(self.done + self.workers.unfinished_bytes(), self.total)

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
        current, total = self.current, self.total
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
        from rich.text import Text

        class Line:
            def __rich__(self) -> Text:
                return Text(line())

        with Console(stderr=True).status(Line()):
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
