"""Starts the workers for `--workers` and `--on`, and stops them on SIGTERM."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from data_pipeline.processes.stop_signals import sigterm_interrupts

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
