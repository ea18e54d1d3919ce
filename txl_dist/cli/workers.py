"""Starts the workers for `--workers` and `--on`, and stops them on SIGTERM and Ctrl-C."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from data_pipeline.system.signals import sigterm_interrupts
from txl_dist.errors import ConfigError, PreemptedError

if TYPE_CHECKING:
    from data_pipeline.system.workers import Workers


@contextlib.contextmanager
def open_workers(on: str, num_workers: int, *, use_gpus: bool = False) -> "Iterator[Workers]":
    """Workers in this process, in child processes, or on Ray; stopped at the end of the context.

    `use_gpus`: with a GPU each, if there are any.
    """
    from data_pipeline.system.workers import InProcess, ProcessWorkers

    if on != "local":
        from txl_dist.launch.launcher import WorkerLauncher, find_launcher

        launcher = find_launcher(on)
        if not isinstance(launcher, WorkerLauncher):
            raise ConfigError(f"--on {on}: this launcher only trains. Use --on local or ray")
        # ray.init installs its own SIGTERM handler, so ours is installed after it.
        workers = launcher.workers(num_workers, use_gpus=use_gpus)
        with workers as pool, sigterm_interrupts():
            yield pool
    elif num_workers == 1:
        yield InProcess()
    else:
        with ProcessWorkers(num_workers) as pool:
            yield pool


@contextlib.contextmanager
def stoppable(advice: str) -> Iterator[None]:
    """Turn SIGTERM and Ctrl-C into PreemptedError, after everything inside has cleaned up."""
    try:
        with sigterm_interrupts():
            yield
    except (KeyboardInterrupt, SystemExit):  # SystemExit: Ray's reaction to SIGTERM while it starts
        raise PreemptedError(f"stopped on request; {advice}") from None
