"""The worker that scores checkpoints while training continues: a process, or an actor of Ray.

Rank 0 starts it for the first checkpoint (`checkpoint_scorer.py`), and it ends with rank 0. Its
output goes to RUN/logs/evaluation.log. Launchers other than Ray use `scoring_process`.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol, Self, TypeVar

import torch

from data_pipeline.system.progress import WorkerStatus
from data_pipeline.system.workers import ProcessWorkers, WorkerDiedError, Workers
from txl_dist.errors import TxlError
from txl_dist.runtime.fault_injection import fault_point

OpenWorkers = Callable[[Path], AbstractContextManager[Workers]]
"""Opens the one worker of a run, whose output goes to a file; a launcher may have its own."""
NICENESS = 5
"""Niceness of the worker, so that training gets the CPU cores first."""

U = TypeVar("U")
R = TypeVar("R")


def scoring_process(log: Path) -> AbstractContextManager[Workers]:
    """A child process of rank 0."""
    return LoggedWorkers(ProcessWorkers(1), log, device_index=_spare_device())


class OpenedWorkers(Workers, Protocol):
    """`Workers` that are a context manager; `__exit__` may be called from another thread."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class LoggedWorkers:
    """`Workers` whose output goes to a file, with error messages that fit a training run."""

    def __init__(
        self, workers: OpenedWorkers, log: Path, *, device_index: int | None = None
    ) -> None:
        self.num_workers, self.peak_memory_bytes = workers.num_workers, 0
        self._workers, self._log, self._device_index = workers, log.absolute(), device_index

    def __enter__(self) -> Self:
        self._workers.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.__exit__(*_)

    def map(self, function: Callable[[U], R], units: Iterable[U]) -> Iterator[tuple[int, R]]:
        logged = partial(_run, self._log, self._device_index, function)
        try:
            yield from self._workers.map(logged, units)
        except WorkerDiedError as error:
            raise TxlError(
                f"{error.event}. Most likely memory ran out (SIGKILL: see dmesg); its output is in "
                f"{self._log}"
            ) from None

    def status(self) -> list[WorkerStatus]:
        return self._workers.status()

    def missing(self) -> str:
        return self._workers.missing()


def _spare_device() -> int | None:
    """The GPU of a worker on this machine: one that no rank uses, or else that of rank 0."""
    num_devices = torch.cuda.device_count()
    if num_devices == 0:
        return None
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "1"))
    return num_ranks if num_ranks < num_devices else 0


# --- in the worker --------------------------------------------------------------------------------

_redirected: set[Path] = set()


def _run(log: Path, device_index: int | None, function: Callable[[U], R], unit: U) -> R:
    if log not in _redirected:
        _redirected.add(log)
        _write_output_to(log)
        with suppress(OSError):  # refused in some containers
            os.nice(NICENESS)
        if device_index is not None:
            torch.cuda.set_device(device_index)
    fault_point("score")
    logging.getLogger(__name__).info("scoring %s", unit)
    return function(unit)


def _write_output_to(path: Path) -> None:
    """Append standard output, standard error and the log of this process to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    format_ = "%(asctime)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=format_, datefmt="%H:%M:%S", force=True)
