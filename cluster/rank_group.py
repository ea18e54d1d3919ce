"""RayRankGroup: the ranks of a launch as Ray actors in a placement group.

    main thread: supervise -> start, poll, kill            never calls Ray
    Ray's thread: connect -> reserve -> RankActor.locate, prepare, run -> events

A call into Ray can block for minutes or without limit, and Python handles no signal meanwhile. So
the main thread only exchanges events and requests with Ray's thread, and abandons it if it blocks.

Each start is a new placement group with one actor per rank (`RankActor`). Why not Ray Train:
docs/decisions/0053-one-supervisor-for-all-launchers.md.
"""

import logging
import math
import queue
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Self

from cluster.connection import (
    SHUTDOWN_SECONDS,
    ConnectionThread,
    lines_of,
    ray_log,
    responds,
)
from cluster.nodes import (
    ClusterMonitor,
    ClusterState,
    RankActor,
    RankLocation,
    Resource,
    choose_resource,
    live_nodes,
    order_ranks,
)
from txl_dist.checkpoint.directory import resume_advice
from txl_dist.errors import TxlError
from txl_dist.launch.launcher import (
    Event,
    NodeLost,
    Preempted,
    RankEnded,
    RankRange,
    RanksUp,
    Room,
)
from txl_dist.training.spec import RunDirectory, TrainSpec

POLL_SECONDS = 0.2
RESERVE_SECONDS = 60.0
"""Elastic runs: time limit for the resources of a start. After that, fewer ranks may start."""
log = logging.getLogger("ray.txl")


class RayRankGroup:
    """The ranks of one launch, on the Ray that `thread` connects."""

    def __init__(self, spec: TrainSpec, ranks: RankRange, thread: ConnectionThread) -> None:
        self.max_restarts = spec.config.ray.max_restarts
        self.waits_for = thread.place
        self.growth_interval_seconds = spec.config.ray.growth_interval_seconds
        self._config, self._ranks, self._thread = spec.config, ranks, thread
        thread.work = self._serve
        self._directory = RunDirectory(spec.run_path)
        self._events: queue.Queue[Event] = queue.Queue()
        self._starts: queue.Queue[tuple[TrainSpec, int]] = queue.Queue()
        self._killed: frozenset[int] = frozenset()
        self._monitor: ClusterMonitor | None = None
        self._locations: list[RankLocation] = []
        """Of the ranks of the current start, by rank; empty until they are up."""
        self._node_ids: frozenset[str] = frozenset()
        """Nodes that were alive when the cluster was polled last."""
        self._waiting_since = time.monotonic()
        """When the ranks began to be waited for."""
        self._is_up = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        self._thread.leave.set()
        is_lost = self._monitor is not None and self._monitor.is_head_lost
        is_ending = self._monitor is not None or self._thread.error is not None
        self._thread.join(SHUTDOWN_SECONDS if is_ending and not is_lost else 0.0)
        if self._thread.is_alive():
            self._thread.abandon(getattr(error, "exit_code", 1) if error else 0)

    # --- the main thread --------------------------------------------------------------------------

    def start(self, spec: TrainSpec, num_ranks: int) -> None:
        self._killed, self._locations = frozenset(), []
        self._starts.put((spec, num_ranks))

    def poll(self) -> list[Event]:
        events = self._take_events()
        error, monitor = self._thread.error, self._monitor
        if monitor is not None and (monitor.is_head_lost or (error and not responds(monitor.head))):
            raise monitor.lost_head_error(resume_advice(self._directory.path))
        if error is not None:
            raise error
        if monitor is not None:
            if monitor.state is not None:
                events += self._news(monitor, monitor.state)
            self.waits_for = monitor.describe_wait(self._ranks.minimum, "rank")
        limit_seconds = self._config.ray.start_timeout_seconds
        if not self._is_up and time.monotonic() - self._waiting_since > limit_seconds:
            ray_log_path = self._directory.logs / "ray.log"
            raise TxlError(
                f"the ranks did not start within {limit_seconds:g} s (ray.start_timeout_seconds), "
                f"while waiting for {self.waits_for}. Ray's log: {ray_log_path}. Run the same "
                "command again, or use --on processes"
            )
        return events

    def request_stop(self) -> None:
        """Ranks see the stop file, also those that are importing their libraries, once they can."""

    def kill(self, ranks: Collection[int]) -> None:
        self._killed |= frozenset(ranks)

    def _take_events(self) -> list[Event]:
        events: list[Event] = []
        while not self._events.empty():
            events.append(event := self._events.get())
            if isinstance(event, RanksUp):
                self._is_up = True
            elif isinstance(event, RankEnded):
                self._is_up, self._waiting_since = False, time.monotonic()
        return events

    def _news(self, monitor: ClusterMonitor, state: ClusterState) -> list[Event]:
        """What the state of the cluster says about room, lost nodes and preemptions."""
        lost = sorted(self._node_ids - state.node_ids)
        self._node_ids = state.node_ids
        events: list[Event] = [Room(state.num_free_slots), *map(NodeLost, lost)]
        for location in self._locations:
            if location.node_id in state.deadlines:
                seconds = state.deadlines[location.node_id]
                when = "soon" if seconds is None else f"in {seconds:.0f} s"
                events.append(Preempted(f"node {location.address} is preempted {when}"))
                break
        return events

    # --- Ray's thread -----------------------------------------------------------------------------

    def _serve(self) -> None:
        """Run one start after another until the launch ends."""
        gpus_per_rank = self._config.ray.gpus_per_rank
        resource = choose_resource(gpus_per_rank, live_nodes(), self._ranks.minimum)
        with (
            ray_log(self._directory.logs / "ray.log"),
            ClusterMonitor(resource) as self._monitor,
        ):
            while not self._thread.leave.is_set():
                try:
                    spec, num_ranks = self._starts.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    continue
                self._run(spec, num_ranks, resource)

    def _run(self, spec: TrainSpec, num_ranks: int, resource: Resource) -> None:
        """One start: reserve, start the actors, and report how each of them ends."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        group = placement_group([{resource: 1}] * num_ranks, strategy="PACK")
        try:
            limit_seconds = RESERVE_SECONDS if self._ranks.is_elastic else math.inf
            if not self._wait(lambda: group.wait(1.0), limit_seconds):
                self._end_all(num_ranks, "the resources of the ranks are not free")
                return
            actors = _start_actors(group, num_ranks, resource)
            try:
                calls = [actor.locate.remote() for actor in actors]
                if not self._wait(lambda: not ray.wait(calls, num_returns=num_ranks, timeout=1)[1]):
                    return
                located = list(zip(ray.get(calls), actors, strict=True))
            except ray.exceptions.RayError as error:
                self._end_all(num_ranks, lines_of(error)[0])
                return
            ranks = order_ranks(located, own_node_id=ray.get_runtime_context().get_node_id())
            self._watch(self._call_ranks(spec, ranks, resource), [actor for _, actor in ranks])
        finally:
            remove_placement_group(group)

    def _end_all(self, num_ranks: int, reason: str) -> None:
        """Report that a start has failed before its ranks were up."""
        for rank in range(num_ranks):
            self._events.put(RankEnded(rank, 1, reason=reason))

    def _call_ranks(
        self, spec: TrainSpec, ranks: list[tuple[RankLocation, Any]], resource: Resource
    ) -> dict[Any, int]:
        """Begin the work of all ranks; returns the call of each rank."""
        locations = [location for location, _ in ranks]
        settings = {
            "spec": spec.to_json(),
            "working_directory": str(Path.cwd()),
            "use_gpu": resource == "GPU",
        }
        prepared = [
            actor.prepare.remote(settings, rank, locations) for rank, (_, actor) in enumerate(ranks)
        ]
        # Ray resolves the port when rank 0 has imported its libraries, as the others do meanwhile.
        calls = {actor.run.remote(prepared[0]): rank for rank, (_, actor) in enumerate(ranks)}
        self._locations = locations
        places = {rank: f" ({location})" for rank, location in enumerate(locations)}
        # A private Ray has one node, which this process would not outlive.
        nodes = {location.node_id for location in locations if not self._thread.is_private}
        self._events.put(RanksUp(places, nodes))
        return calls

    def _watch(self, calls: dict[Any, int], actors: list[Any]) -> None:
        """Report how each rank ends, until all have or the main thread has given them up."""
        import ray

        while calls and not self._thread.leave.is_set() and self._starts.empty():
            for rank in self._killed & set(calls.values()):
                ray.kill(actors[rank])
            ready, _ = ray.wait(list(calls), timeout=POLL_SECONDS)
            for call in ready:
                self._events.put(self._end_of(calls.pop(call), call))

    def _end_of(self, rank: int, call: Any) -> RankEnded:
        import ray

        try:
            error: TxlError | None = ray.get(call)
        except ray.exceptions.RayTaskError as failure:
            log.warning("rank %d: %s", rank, failure)
            return RankEnded(rank, 1, reason=lines_of(getattr(failure, "cause", failure))[0])
        except ray.exceptions.RayError as death:
            log.warning("rank %d: %s", rank, death)
            return RankEnded(rank, None, reason=lines_of(death)[0])
        return RankEnded(rank, error.exit_code if error else 0, error)

    def _wait(self, is_done: Callable[[], bool], limit_seconds: float = math.inf) -> bool:
        """Wait until `is_done`, which waits a second; false after the limit, or if the launch ends
        before.
        """
        deadline = time.monotonic() + limit_seconds
        while not self._thread.leave.is_set() and time.monotonic() < deadline:
            if is_done():
                return True
        return False


def _start_actors(group: Any, num_ranks: int, resource: Resource) -> list[Any]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    remote = ray.remote(RankActor)
    return [
        remote.options(
            num_cpus=int(resource == "CPU"),
            num_gpus=int(resource == "GPU"),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            ),
        ).remote()
        for bundle in range(num_ranks)
    ]
