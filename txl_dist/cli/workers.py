"""Who works: the options `--workers` and `--on`."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from data_pipeline.processes.stop_signals import sigterm_interrupts

if TYPE_CHECKING:
    from data_pipeline.processes.workers import Workers

NumWorkers = Annotated[int, typer.Option(min=1, help="Processes, or Ray tasks, that work at once.")]
On = Annotated[
    str,
    typer.Option(
        metavar="local|ADDRESS",
        help="Where workers run: local processes; ray: a Ray of its own; or a running cluster, "
        "whose nodes must all see the input and the output directory.",
    ),
]


@contextlib.contextmanager
def open_workers(on: str, num_workers: int) -> "Iterator[Workers]":
    from data_pipeline.processes.workers import InProcess, ProcessWorkers

    if on != "local":
        from txl_dist.launch.launcher import find_launcher

        with find_launcher(on).workers(num_workers) as pool, sigterm_interrupts():
            yield pool
    elif num_workers == 1:
        yield InProcess()
    else:
        with ProcessWorkers(num_workers) as pool:
            yield pool
