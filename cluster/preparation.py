"""Workers on Ray for `txl prepare` and `txl data verify`: `workers.Workers`, one task a unit.

At most `num_workers` tasks at once, each with one CPU. A unit names its files; text never passes
through Ray. On a cluster the input and the output must be on paths that all nodes share, which
every task checks by the staging folder's fingerprint (`work_units.py`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from cluster.session import ray_session
from data_pipeline.errors import TxlError
from data_pipeline.processes.workers import MAX_DEATHS, died, peak_memory_bytes

U = TypeVar("U")
R = TypeVar("R")


class RayWorkers:
    """Ray tasks as `Workers`. `address` None: a Ray of our own on this machine."""

    def __init__(self, num_workers: int, *, address: str | None) -> None:
        self.num_workers = num_workers
        self.peak_memory_bytes = 0
        self._address = address
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(ray_session(self._address, num_cpus=self.num_workers))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def map(self, function: Callable[[U], R], units: Iterable[U]) -> Iterator[tuple[int, R]]:
        """See `Workers.map`."""
        import ray

        # Ray's own retries would hide a unit that kills every worker it meets.
        remote = ray.remote(num_cpus=1, max_retries=0)(_answer)
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
                for done in ray.wait(list(running))[0]:
                    number, unit = running.pop(done)
                    try:
                        answer, peak = ray.get(done)
                    except ray.exceptions.RayTaskError:
                        raise  # a mistake of ours, with its traceback
                    except ray.exceptions.RayError:
                        deaths[number] = deaths.get(number, 0) + 1
                        if deaths[number] == MAX_DEATHS:
                            raise died(unit, None) from None
                        running[remote.remote(function, unit)] = number, unit
                        continue
                    self.peak_memory_bytes = max(self.peak_memory_bytes, peak)
                    if isinstance(answer, TxlError):
                        raise answer
                    yield number, answer
        finally:
            for task in running:
                ray.cancel(task, force=True)


def _answer(function: Callable[[U], R], unit: U) -> tuple[R | TxlError, int]:
    """The result, or the TxlError as a value, which Ray would wrap; and this worker's peak."""
    try:
        return function(unit), peak_memory_bytes()
    except TxlError as error:
        return error, peak_memory_bytes()
