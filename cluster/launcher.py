"""RayLauncher, the launcher for `txl ... --on ray` and `--on ADDRESS`, and its workers.

RayWorkers are the workers of `txl eval`, `txl prepare` and `txl data verify` as Ray actors.

    RayWorkers.map(function, units) -> Worker.run (actors, one per CPU or GPU) -> results

At most `num_workers` actors run, each with one CPU or GPU. They start when units wait for
them, and live until the context ends, so an evaluation loads its model once per worker. An idle
worker gets the next unit. If a worker dies, another one gets its unit; a unit that has killed
MAX_DEATHS workers ends the work with an error.

A unit contains paths, offsets and settings; text never passes through Ray. All nodes must see the
data under the same paths; `work_units.py` checks that for every unit of a preparation.
"""

import contextlib
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, TypeVar

from cluster.connection import ConnectionThread, lines_of, ray_log
from cluster.nodes import ClusterMonitor, check_cluster_nodes, choose_resource, live_nodes
from cluster.rank_group import RayRankGroup
from data_pipeline.errors import TxlError, UnfinishedError
from data_pipeline.system.workers import MAX_DEATHS, WorkerDiedError, peak_memory_bytes
from txl_dist.launch.launcher import Launcher
from txl_dist.launch.rank_group import RankGroup, RankRange
from txl_dist.runtime.process import usable_cores
from txl_dist.training.spec import TrainSpec

if TYPE_CHECKING:
    from data_pipeline.system.workers import Workers
    from txl_dist.launch.doctor import DoctorRequest, Finding

log = logging.getLogger(__name__)

U = TypeVar("U")
R = TypeVar("R")

POLL_SECONDS = 0.5
MAX_FAILED_STARTS = 3
"""Workers in a row that die before they are ready."""


class Worker:
    """The actor. A TxlError is returned, because Ray would wrap it if it were raised."""

    def locate(self) -> str:
        """Name this process. The first call: it returns once the actor runs."""
        import ray

        return f"the worker on {ray.util.get_node_ip_address()}, pid {os.getpid()}"

    def run(self, function: Callable[[U], R], unit: U) -> tuple[R | TxlError, int]:
        """The result of a unit, and the most host memory of this process, in bytes."""
        try:
            return function(unit), peak_memory_bytes()
        except TxlError as error:
            return error, peak_memory_bytes()


@dataclass(eq=False)
class _WorkerHandle:
    """An actor as the driver sees it."""

    actor: Any
    name: str = "a worker"
    task: tuple[int, Any] | None = None
    """Number and unit; None while it starts or is idle."""


class RayWorkers:
    """`Workers` on the Ray that `thread` connects.

    `use_gpus`: each worker gets a GPU if the cluster has any.
    """

    def __init__(self, num_workers: int, thread: ConnectionThread, *, use_gpus: bool) -> None:
        self.num_workers = num_workers
        self.peak_memory_bytes = 0
        self._thread, self._use_gpus = thread, use_gpus
        self._is_closed = False
        self._stack = ExitStack()
        self._idle: list[_WorkerHandle] = []
        # By the object reference of the call: the workers that start or are busy.
        self._calls: dict[Any, _WorkerHandle] = {}
        self._queue: deque[tuple[int, Any]] = deque()  # units without a worker
        self._deaths: Counter[int] = Counter()  # by number of the unit: its dead workers
        self._num_failed_starts = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._thread.opened())
            stack.enter_context(ray_log(None))
            import ray  # after `ray_connection` has set the variables that Ray reads

            # Without `use_gpus` the workers need CPUs, also if there are GPUs.
            gpus = None if self._use_gpus else 0
            resource = choose_resource(gpus, live_nodes(), self.num_workers)
            self._actor_class = ray.remote(
                # No restarts by Ray: it would repeat a unit that kills every worker, without
                # naming it. SPREAD: the workers share the memory bandwidth of all nodes.
                num_cpus=1,
                num_gpus=int(resource == "GPU"),
                max_restarts=0,
                scheduling_strategy="SPREAD",
            )(Worker)
            self._monitor = stack.enter_context(ClusterMonitor(resource))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Also from another thread: a `map` that is running then raises UnfinishedError."""
        self._is_closed = True
        self._kill([*self._idle, *self._calls.values()])
        self._stack.close()

    def map(self, function: Callable[[U], R], units: Iterable[U]) -> Iterator[tuple[int, R]]:
        """See `Workers.map`. Closing the generator early kills the workers that are busy."""
        import ray

        pending = enumerate(units)
        try:
            while True:
                if self._is_closed:
                    raise UnfinishedError("the workers were closed")
                self._fill(function, pending)
                if not any(handle.task for handle in self._calls.values()) and not self._queue:
                    return
                ready, _ = ray.wait(list(self._calls), timeout=POLL_SECONDS)
                for call in ready:
                    handle = self._calls.pop(call)
                    if handle.task is None:
                        self._finish_start(call, handle)
                    elif (result := self._finish_unit(call, handle)) is not None:
                        yield result
                if self._monitor.is_head_lost:
                    raise self._monitor.lost_head_error(
                        "Run the same command; finished work is kept (txl eval: with --resume)"
                    )
        finally:
            busy = {call: handle for call, handle in self._calls.items() if handle.task}
            self._kill(list(busy.values()))
            for call in busy:
                del self._calls[call]
            self._queue.clear()
            self._deaths.clear()

    def unfinished_bytes(self) -> int:
        return 0  # actors do not report them

    def missing(self) -> str:
        handles = list(self._calls.values())
        num_missing = sum(handle.task is None for handle in handles)
        if num_missing < len(handles) or not num_missing:
            return ""
        return self._monitor.describe_wait(num_missing, "worker")

    # --- workers ----------------------------------------------------------------------------------

    def _fill(self, function: Callable[[U], R], pending: Iterator[tuple[int, U]]) -> None:
        """Give units to idle workers, and start workers for the units that wait."""
        num_busy = sum(handle.task is not None for handle in self._calls.values())
        self._queue.extend(islice(pending, max(0, self.num_workers - num_busy - len(self._queue))))
        while self._queue and self._idle:
            handle = self._idle.pop()
            handle.task = self._queue.popleft()
            self._calls[handle.actor.run.remote(function, handle.task[1])] = handle
            num_busy += 1
        num_starting = len(self._calls) - num_busy
        for _ in range(min(len(self._queue), self.num_workers - num_busy) - num_starting):
            handle = _WorkerHandle(self._actor_class.remote())
            self._calls[handle.actor.locate.remote()] = handle

    def _finish_start(self, call: Any, handle: _WorkerHandle) -> None:
        import ray

        try:
            handle.name = ray.get(call)
        except ray.exceptions.RayError as error:
            self._kill([handle])
            self._num_failed_starts += 1
            if self._num_failed_starts == MAX_FAILED_STARTS:
                reason = " ".join(lines_of(error)[:6])
                raise TxlError(
                    f"{MAX_FAILED_STARTS} workers in a row died while they started. Ray says: "
                    f"{reason}. All nodes need this version of txl and its packages"
                ) from None
            return
        self._num_failed_starts = 0
        self._idle.append(handle)

    def _finish_unit(self, call: Any, handle: _WorkerHandle) -> tuple[int, Any] | None:
        """Number and result of a unit; None if its worker died. Raises the unit's TxlError."""
        import ray

        assert handle.task is not None
        (number, unit), handle.task = handle.task, None
        try:
            result, peak = ray.get(call)
        except ray.exceptions.RayTaskError:
            raise  # a bug: keep the worker's traceback
        except ray.exceptions.RayError:
            # An unreachable worker is treated as dead; repeating its unit is safe because units
            # are deterministic.
            self._kill([handle])
            log.warning("%s died while it worked on %s", handle.name, unit)
            self._deaths[number] += 1
            if self._deaths[number] == MAX_DEATHS:
                raise WorkerDiedError(unit, None) from None
            self._queue.appendleft((number, unit))
            return None
        self.peak_memory_bytes = max(self.peak_memory_bytes, peak)
        self._idle.append(handle)
        if isinstance(result, TxlError):
            raise result
        return number, result

    def _kill(self, handles: list[_WorkerHandle]) -> None:
        import ray

        if self._monitor.is_head_lost:
            return  # the call would not return, and Ray has ended the workers
        for handle in handles:
            with contextlib.suppress(ray.exceptions.RayError, RuntimeError, ValueError):
                ray.kill(handle.actor)


class RayLauncher(Launcher):
    """Trains, evaluates and prepares with actors.

    `address` is that of a running cluster; None starts a private Ray on this machine.
    """

    def __init__(self, address: str | None = None) -> None:
        self._address = address

    def rank_group(self, spec: TrainSpec, ranks: RankRange) -> AbstractContextManager[RankGroup]:
        """The ranks as actors in a placement group."""
        # Ray starts a rank only if its CPUs are free, so a private Ray has enough for all.
        num_cpus = max(ranks.maximum, usable_cores())
        return RayRankGroup(spec, ranks, ConnectionThread(self._address, num_cpus=num_cpus))

    def workers(
        self, num_workers: int, *, use_gpus: bool = False
    ) -> "AbstractContextManager[Workers]":
        """Ray actors; on a cluster, all nodes must see the same files as this process."""
        thread = ConnectionThread(self._address, num_cpus=num_workers)
        return RayWorkers(num_workers, thread, use_gpus=use_gpus)

    def check_nodes(self, request: "DoctorRequest") -> "list[Finding]":
        """Check every node of the cluster, and the links between them."""
        return check_cluster_nodes(request, address=self._address)
