"""Starts the workers for `--workers` and `--on`, and stops them on SIGTERM."""

import contextlib
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from data_pipeline.processes.workers import Workers


@contextlib.contextmanager
def open_workers(on: str, num_workers: int) -> "Iterator[Workers]":
    """Workers in this process, in child processes, or on Ray; stopped at the end of the context."""
    from data_pipeline.processes.workers import InProcess, ProcessWorkers

    if on != "local":
        from txl_dist.launch.launcher import find_launcher

        # ray.init installs its own SIGTERM handler, so ours is installed after it.
        with find_launcher(on).workers(num_workers) as pool, sigterm_interrupts():
            yield pool
    elif num_workers == 1:
        yield InProcess()
    else:
        with ProcessWorkers(num_workers) as pool:
            yield pool


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as Ctrl-C does, until the end of the context."""

    def interrupt(number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
