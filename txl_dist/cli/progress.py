"""Progress of long commands: a live display on a terminal, plain lines elsewhere.

    run_progress     training: the log lines of rank 0, on standard output
    chunk_progress   attention: chunks done, on standard error, terminals only
    running          work without steps, on standard error: a spinner, or lines

`work_progress.py` has that of work in bytes or tokens. rich is imported only where a display is
drawn: `txl --help` imports these modules.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_LINE_SECONDS = 1.5
"""Work that takes less is not named where output is plain lines."""
SILENT_SECONDS = 4.0
"""Longest time without a line after that."""
BAR_COLUMNS = 20
COLUMNS_WITH_BAR = 100
"""The step bar is left out on terminals with fewer columns: the step line needs the space."""


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
    """Show `text` while the context is open. Elsewhere than on a terminal, work that takes longer
    than FIRST_LINE_SECONDS is named by a line, which is repeated every few seconds with the time.
    """
    if quiet:
        yield
        return
    if not sys.stderr.isatty():
        with _repeated(text):
            yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@contextmanager
def _repeated(text: str) -> Iterator[None]:
    begin, ended = time.monotonic(), threading.Event()

    def repeat() -> None:
        if not ended.wait(FIRST_LINE_SECONDS):
            _print_line(text)
            while not ended.wait(SILENT_SECONDS):
                _print_line(f"{text}: {time.monotonic() - begin:.0f} s")

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _print_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")  # one call, so lines of two threads are not mixed
    sys.stderr.flush()
