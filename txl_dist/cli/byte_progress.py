"""Progress of commands that go through many bytes: a bar on a terminal, else a line at times."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

_MIB = 2**20
_SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def progress_in_bytes() -> Iterator[Callable[[str, int, int], None]]:
    """progress(what, done, total) in bytes, on standard error: a bar on a terminal, else lines."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        *(TextColumn("{task.description}"), BarColumn(), DownloadColumn()),
        *(TransferSpeedColumn(), TimeRemainingColumn()),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, phase = bar.add_task(""), ""

        def show(what: str, done: int, total: int) -> None:
            nonlocal phase
            if what != phase:
                bar.reset(task, completed=done, total=total)  # rates are of one phase
                phase = what
            bar.update(task, description=what, completed=done, total=total)

        yield show


def _lines() -> Callable[[str, int, int], None]:
    phase, began, first, last = "", 0.0, 0, time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        nonlocal phase, began, first, last
        now = time.monotonic()
        if what != phase or done == first:  # until then nothing was done in this phase
            phase, began, first = what, now, done
        if now - last < _SECONDS_BETWEEN_LINES or not total:
            return
        last = now
        speed = ""
        if done > first and now > began:
            rate = (done - first) / _MIB / (now - began)
            speed = f", {rate:,.1f} MiB/s, {(total - done) / _MIB / rate:,.0f} s left"
        print(
            f"{what}: {done / _MIB:,.1f} of {total / _MIB:,.1f} MiB ({done / total:.0%}){speed}",
            file=sys.stderr,
        )

    return show
