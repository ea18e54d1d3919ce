"""Progress of long commands on standard error: rich on a terminal, plain lines elsewhere.

    run_progress     training: the lines of rank 0's log, on standard output
    work_progress    work in bytes, tokens or other units: amount, rate, time left
    running          work without steps: a spinner, or its name

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
"""show(phase, done, total), to be called often."""

FIRST_LINE_SECONDS = 1.5
"""Work without steps that takes less is not named where output is plain lines."""
SILENT_SECONDS = 4.0
"""Between two plain lines."""
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
def running(text: str, *, quiet: bool = False) -> Iterator[None]:
    """Show `text` while the context is open. Elsewhere than on a terminal, work that takes longer
    than FIRST_LINE_SECONDS is named by a line, which is repeated every few seconds with the time.
    """
    if quiet:
        yield
        return
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(text):
            yield
        return

    def print_lines() -> Iterator[float]:
        start = time.monotonic()
        yield FIRST_LINE_SECONDS
        _print_line(text)
        while True:
            yield SILENT_SECONDS
            _print_line(f"{text}: {time.monotonic() - start:.0f} s")

    with _in_thread(print_lines()):
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
    """Yield `show(phase, done, total)`, both in bytes or in units.

    On a terminal a bar, elsewhere a line every few seconds.
    """
    work = _Work(unit, workers)
    with _live_display(work) if sys.stderr.isatty() else _in_thread(_print_work(work)):
        yield work.update


class _Work:
    """What is known of the work: its phase, amount and rate."""

    def __init__(self, unit: WorkUnit, workers: "Workers | None") -> None:
        self.unit, self.workers, self.phase = unit, workers, ""
        self.done = self.total = self._first_done = 0
        self.start = self._phase_start = self._updated = time.monotonic()

    def update(self, phase: str, done: int, total: int) -> None:
        self._updated = time.monotonic()
        # While `done` does not change, only finished units are looked up: that time is not work.
        if phase != self.phase or done == self._first_done:
            self.phase, self._phase_start, self._first_done = phase, self._updated, done
        if total:
            self.done, self.total = done, total

    @property
    def current(self) -> int:
        """`done`, with the bytes of the units that workers are at, at most `total`."""
        if self.workers is None or self.unit is not MIB:
            return self.done
        return min(self.done + self.workers.unfinished_bytes(), self.total)

    def amount(self, done: int) -> str:
        """`reading: 60.0 of 90.0 MiB (67%)`."""
        total, unit = self.total, self.unit
        if not total:
            return "starting"
        amounts = f"{unit.show(done)} of {unit.show(total)} {unit.name} ({done / total:.0%})"
        return f"{self.phase}: {amounts}"

    def line(self) -> str:
        """`reading: 60.0 of 90.0 MiB (67%), 10.0 MiB/s, 3 s left`.

        Without a rate in this phase: what the work waits for, and the time since it began.
        """
        amount, unit = self.amount(self.current), self.unit
        done, seconds = self.done - self._first_done, self._updated - self._phase_start
        if done > 0 and seconds > 0:
            rate = done / seconds
            # Counted down between two updates: a line that is repeated says so.
            waited = time.monotonic() - self._updated
            left = max(0.0, (self.total - self.done) / rate - waited)
            return f"{amount}, {unit.show(rate)} {unit.name}/s, {left:,.0f} s left"
        seconds = time.monotonic() - self.start
        if self.workers and (missing := self.workers.missing()):
            return f"waiting {seconds:,.0f} s for {missing}"
        return f"{amount}, {seconds:,.0f} s"


@contextmanager
def _live_display(work: _Work) -> Iterator[None]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task
    from rich.text import Text

    class WorkColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            task.completed, task.total = work.current, work.total or None
            return Text(work.line())

    columns = WorkColumn(), BarColumn(BAR_COLUMNS)
    with Progress(*columns, console=Console(stderr=True), transient=True) as display:
        display.add_task("", total=None)
        yield


def _print_work(work: _Work) -> Iterator[float]:
    """Print a line every few seconds; yields the seconds to wait."""
    while True:
        yield SILENT_SECONDS
        _print_line(work.line())


@contextmanager
def _in_thread(pauses: Iterator[float]) -> Iterator[None]:
    """Iterate in a thread while the context is open, and wait for each of the seconds it yields."""
    ended = threading.Event()

    def run() -> None:
        for seconds in pauses:
            if ended.wait(seconds):
                return

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _print_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")  # one call, so lines of two threads are not mixed
    sys.stderr.flush()
