"""Progress of long work: a live display on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from txl_dist.training.follow import step_of

BAR_COLUMNS = 20
COLUMNS_WITH_BAR = 100


@contextmanager
def run_progress(num_steps: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Gives what to call with every line of a run's log.

    On a terminal a step line, as much of it as fits, replaces the one before it, beside a bar where
    there is room; other lines stay.
    """
    if quiet:
        yield lambda line: None
        return
    if not sys.stdout.isatty():
        yield lambda line: print(line, flush=True)
        return
    console = Console()
    bar = [BarColumn(BAR_COLUMNS)] if console.width >= COLUMNS_WITH_BAR else []
    columns = (TextColumn("{task.percentage:>3.0f}%"), *bar, TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting the ranks", total=num_steps)

        def on_line(line: str) -> None:
            if (step := step_of(line)) is not None:
                room = console.width - len("100% ") - (BAR_COLUMNS + 1 if bar else 0)
                progress.update(task, completed=step, description=fitted(line, room))
            else:
                progress.console.print(line, markup=False, highlight=False)

        yield on_line


def fitted(line: str, num_columns: int) -> str:
    """A log line without its time of day, cut after the last of its parts that fits."""
    first, *parts = line.partition(" ")[2].split(" | ")
    for part in parts:
        if len(first) + len(part) + 3 > num_columns:
            break
        first += f" | {part}"
    return first


@contextmanager
def chunk_progress(*, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Gives what to call with (chunks done, chunks); shown on standard error, terminals only."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda done, total: None
        return
    with Progress(*Progress.get_default_columns(), console=console) as progress:
        task = progress.add_task("scoring")
        yield lambda done, total: progress.update(task, completed=done, total=total)
