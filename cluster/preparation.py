"""RayWorkers: the workers of `txl prepare` and `txl data verify` as Ray tasks, one per unit.

At most `num_workers` tasks run in parallel, with one CPU each. A unit contains paths and offsets;
text never passes through Ray. On a cluster all nodes must see the input and the output under the
same paths. Every task checks that by the fingerprint of the staging directory (`work_units.py`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Self, TypeVar

from cluster.connection import ray_connection
from data_pipeline.errors import TxlError
from data_pipeline.processes.workers import MAX_DEATHS, peak_memory_bytes, worker_died_error

U = TypeVar("U")
R = TypeVar("R")


class RayWorkers:
    """`Workers` as Ray tasks. `address` None: a private Ray on this machine."""

    def __init__(self, num_workers: int, *, address: str | None) -> None:
        self.num_workers = num_workers
        self.peak_memory_bytes = 0
        self._address = address
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(ray_connection(self._address, num_cpus=self.num_workers))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def map(self, function: Callable[[U], R], units: Iterable[U]) -> Iterator[tuple[int, R]]:
        """See `Workers.map`."""
        import ray

        # No retries by Ray: it would repeat a unit that kills every worker, without naming it.
        remote = ray.remote(num_cpus=1, max_retries=0)(_run_unit)
        pending = enumerate(units)
        running: dict[Any, tuple[int, U]] = {}
        deaths: dict[int, int] = {}
        try:
            while True:
                while len(running) < self.num_workers:
                    number, unit = next(pending, (-1, None))
                    if unit is None:
                        break
                    running[remote.remote(function, unit)] = number, unit
                if not running:
                    return
                for task in ray.wait(list(running))[0]:
                    number, unit = running.pop(task)
                    try:
                        result, peak = ray.get(task)
                    except ray.exceptions.RayTaskError:
                        raise  # a bug: keep the task's traceback
                    except ray.exceptions.RayError:
                        deaths[number] = deaths.get(number, 0) + 1
                        if deaths[number] == MAX_DEATHS:
                            raise worker_died_error(unit, None) from None
                        running[remote.remote(function, unit)] = number, unit
                        continue
                    self.peak_memory_bytes = max(self.peak_memory_bytes, peak)
                    if isinstance(result, TxlError):
                        raise result
                    yield number, result
        finally:
            for task in running:
                ray.cancel(task, force=True)


def _run_unit(function: Callable[[U], R], unit: U) -> tuple[R | TxlError, int]:
    """The unit's result and this worker's peak memory.

    A TxlError is returned, because Ray would wrap it if it were raised.
    """
    try:
        return function(unit), peak_memory_bytes()
    except TxlError as error:
        return error, peak_memory_bytes()
