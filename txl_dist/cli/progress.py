"""Progress of long commands: a live display on a terminal, plain lines elsewhere.

    run_progress       training: the log lines of rank 0, on standard output
    chunk_progress     evaluation: chunks done, on standard error, terminals only
    running            work without steps: a spinner on standard error, terminals only
    progress_in_bytes  preparation, verification and upload: bytes and speed, on standard error

rich is imported only where a display is drawn: `txl --help` imports this module.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BAR_COLUMNS = 20
COLUMNS_WITH_BAR = 100
"""The step bar is left out on terminals with fewer columns: the step line needs the space."""

_MIB = 2**20
_SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def run_progress(num_steps: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield `on_line(line)`, to be called with every line of a run's log.

    On a terminal each step line replaces the previous one, cut to the width of the terminal, with a
    bar if there is room. Other lines scroll as usual.
    """
    if quiet:
        yield lambda line: None
        return
    if not sys.stdout.isatty():
        yield lambda line: print(line, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from txl_dist.training.follow import step_of

    # 75 of 80 columns are left for the step line: loss, perplexity, speed and time left fit.
    console = Console()
    bar = [BarColumn(BAR_COLUMNS)] if console.width >= COLUMNS_WITH_BAR else []
    columns = (TextColumn("{task.percentage:>3.0f}%"), *bar, TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting the ranks", total=num_steps)

        def on_line(line: str) -> None:
            if (step := step_of(line)) is not None:
                room = console.width - len("100% ") - (BAR_COLUMNS + 1 if bar else 0)
                progress.update(task, completed=step, description=fit_step_line(line, room))
            else:
                progress.console.print(line, markup=False, highlight=False)

        yield on_line


def fit_step_line(line: str, num_columns: int) -> str:
    """A step line without its time of day, cut after the last field that fits."""
    text, *fields = line.partition(" ")[2].split(" | ")
    for field in fields:
        if len(text) + len(field) + 3 > num_columns:
            break
        text += f" | {field}"
    return text


@contextmanager
def chunk_progress(*, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield `on_progress(chunks done, chunks)`."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("scoring")
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def running(text: str, *, quiet: bool) -> Iterator[None]:
    """Show `text` while the context is open."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@contextmanager
def progress_in_bytes() -> Iterator[Callable[[str, int, int], None]]:
    """Yield `progress(phase, bytes done, bytes in total)`."""
    if not sys.stderr.isatty():
        yield _line_printer()
        return
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with rich_progress.Progress(*columns, console=console, transient=True) as bar:
        task, current_phase = bar.add_task(""), ""

        def show(phase: str, done: int, total: int) -> None:
            nonlocal current_phase
            if phase != current_phase:
                # A new phase starts a new speed measurement, from the bytes already done.
                bar.reset(task, completed=done, total=total)
                current_phase = phase
            bar.update(task, description=phase, completed=done, total=total)

        yield show


def _line_printer() -> Callable[[str, int, int], None]:
    """A callback like that of `progress_in_bytes` that prints a line every few seconds."""
    current_phase, phase_start, first_done, last_line = "", 0.0, 0, time.monotonic()

    def show(phase: str, done: int, total: int) -> None:
        nonlocal current_phase, phase_start, first_done, last_line
        seconds = time.monotonic()
        # While `done` does not change, only finished units are looked up: that time is not work.
        if phase != current_phase or done == first_done:
            current_phase, phase_start, first_done = phase, seconds, done
        if seconds - last_line < _SECONDS_BETWEEN_LINES or not total:
            return
        last_line = seconds
        speed = ""
        if done > first_done and seconds > phase_start:
            rate = (done - first_done) / _MIB / (seconds - phase_start)
            speed = f", {rate:,.1f} MiB/s, {(total - done) / _MIB / rate:,.0f} s left"
        print(
            f"{phase}: {done / _MIB:,.1f} of {total / _MIB:,.1f} MiB ({done / total:.0%}){speed}",
            file=sys.stderr,
        )

    return show
