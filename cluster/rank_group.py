"""RayRankGroup: the ranks of a launch as Ray actors in a placement group.

    main thread: supervise -> start, poll, kill            never calls Ray
    Ray's thread: connect -> reserve -> RankActor -> events
                    RankActor.locate    where it runs; `order_ranks` numbers the ranks by that
                    RankActor.prepare   the environment of the rank; imports torch
                    RankActor.run       train_rank; returns the TxlError that ended it

A call into Ray can block for minutes or without limit, and Python handles no signal meanwhile. So
the main thread only exchanges events and requests with Ray's thread, and abandons it if it blocks.

Each start is a new placement group with one actor per rank (`RankActor`). Why not Ray Train:
docs/decisions/0053-one-supervisor-for-all-launchers.md.
"""

import logging
import math
import os
import queue
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

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
    Resource,
    choose_resource,
    live_nodes,
)
from txl_dist.checkpoint.directory import resume_advice
from txl_dist.errors import ConfigError, TxlError
from txl_dist.launch.rank_group import (
    Event,
    NodeLost,
    Preempted,
    RankEnded,
    RankRange,
    RanksUp,
    Room,
)
from txl_dist.runtime.process import free_port, usable_cores
from txl_dist.training.spec import RunDirectory, TrainSpec

POLL_SECONDS = 0.2
RESERVE_SECONDS = 60.0
"""Elastic runs: time limit for the resources of a start. After that, fewer ranks may start."""
log = logging.getLogger("ray.txl")


@dataclass(frozen=True, slots=True)
class RankLocation:
    """The process of a rank, and what it has reserved there."""

    node_id: str
    address: str
    pid: int
    gpus: tuple[str, ...]
    node_cpus: float
    """CPUs that the node offers to Ray; 0: not known."""

    def __str__(self) -> str:
        return f"node {self.address}, pid {self.pid}"


def order_ranks(
    located: Sequence[tuple[RankLocation, Any]], *, own_node_id: str
) -> list[tuple[RankLocation, Any]]:
    """Actors in rank order: those of a node together, the launcher's node first."""

    def key(entry: tuple[RankLocation, Any]) -> tuple[object, ...]:
        location, _ = entry
        is_elsewhere = location.node_id != own_node_id
        return is_elsewhere, location.address, location.node_id, location.gpus, location.pid

    return sorted(located, key=key)


class RankActor:
    """The actor. A TxlError is returned, because Ray would wrap it if it were raised."""

    def locate(self) -> RankLocation:
        import ray

        context = ray.get_runtime_context()
        node = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        return RankLocation(
            context.get_node_id(),
            ray.util.get_node_ip_address(),
            os.getpid(),
            tuple(context.get_accelerator_ids().get("GPU", ())),
            node["Resources"].get("CPU", 0.0),
        )

    def prepare(
        self, settings: dict[str, Any], rank: int, locations: Sequence[RankLocation]
    ) -> int:
        """Set what the rank reads from its environment; returns a free port of this node."""
        own = locations[rank]
        peers = [n for n, other in enumerate(locations) if other.node_id == own.node_id]
        gpus = [gpu for n in peers for gpu in locations[n].gpus[:1]]
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(locations)),
            "LOCAL_RANK": str(peers.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(peers)),
            "MASTER_ADDR": locations[0].address,
            # NCCL reaches the other GPUs of a node by their numbers. Ray does not hide GPUs from a
            # process that has reserved none.
            "CUDA_VISIBLE_DEVICES": ",".join(gpus) if settings["use_gpu"] else "",
        }
        for name, value in settings["environment"].items():
            os.environ.setdefault(name, value)
        if "NCCL_DEBUG" in os.environ:  # Ray hides what a rank prints
            os.environ.setdefault("NCCL_DEBUG_FILE", settings["nccl_log"])
        use_interface_of(own.address)
        if Path(settings["working_directory"]).is_dir():
            os.chdir(settings["working_directory"])  # the config may have relative paths
        self._settings, self._own, self._num_peers = settings, own, len(peers)

        import txl_dist.training.rank  # noqa: F401  # a slow import: no rank waits for another

        return free_port(own.address)

    def run(self, port: int, _own_port: int) -> TxlError | None:
        """Train until the run ends; returns the error that ended it. `port` is that of rank 0.

        The other is the result of this rank's `prepare`: if that has failed, Ray reports its error.
        """
        import torch

        from data_pipeline.system.signals import StopSignals, unblock_stop_signals
        from txl_dist.runtime.stop import exit_before_first_step
        from txl_dist.runtime.world import World
        from txl_dist.training.rank import train_rank
        from txl_dist.training.spec import TrainSpec

        os.environ["MASTER_PORT"] = str(port)
        spec = TrainSpec.from_json(self._settings["spec"])
        directory = Path(self._settings["working_directory"])
        if not (directory.is_dir() or spec.run_path.is_absolute()):
            return ConfigError(
                f"the host {self._own.address} has no directory {directory}, where the command "
                f"runs, and directory={spec.run_path} is relative to it. Give absolute paths that "
                "all hosts see: directory=/..., data.path=/..."
            )
        torch.set_num_threads(
            num_threads(ranks_on_node=self._num_peers, ray_cpus=self._own.node_cpus)
        )
        with StopSignals(on_request=exit_before_first_step):
            # A private Ray blocks stop signals in its processes. A signal that reaches only this
            # rank is a request to all.
            unblock_stop_signals()
            try:
                train_rank(spec, World.from_environment())
            except TxlError as error:
                return error
        return None


def num_threads(*, ranks_on_node: int, ray_cpus: float) -> int:
    """Threads of a rank on this node. `ray_cpus` is what the node offers to Ray; 0: unknown."""
    # Ray knows the limit of a container and what the administrator has set.
    usable = min(usable_cores(), int(ray_cpus)) if ray_cpus else usable_cores()
    return max(1, usable // ranks_on_node)


COMMUNICATION_VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_")
"""Beginnings of the launcher's variables that ranks get, unless their node has others. Interfaces
may have other names there."""
INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""Variable -> format of its value. Without =, NCCL matches prefixes: eth1 matches eth10."""


def use_interface_of(address: str) -> None:
    """Make gloo and NCCL use the interface with the node's Ray address, unless the user chose one.

    By default gloo announces the address that the host's own name resolves to. On Debian that is
    127.0.1.1, which no rank on another host can reach. NCCL has heuristics too. Ray's address of a
    node is known to be reachable, because the nodes connect to each other through it.
    """
    if (interface := interface_of(address)) is not None:
        for name, form in INTERFACE_VARIABLES.items():
            os.environ.setdefault(name, form.format(interface))


def interface_of(address: str) -> str | None:
    """The interface that has `address`; None if no interface has it (NAT)."""
    for name, entries in psutil.net_if_addrs().items():
        # An IPv6 address may end with its interface: fe80::1%eth0.
        if address in {entry.address.partition("%")[0] for entry in entries}:
            return name
    return None


class RayRankGroup:
    """The ranks of one launch, on the Ray that `thread` connects."""

    def __init__(self, spec: TrainSpec, ranks: RankRange, thread: ConnectionThread) -> None:
        self.max_restarts = spec.config.ray.max_restarts
        self.waits_for = thread.place
        self.growth_interval_seconds = spec.config.ray.growth_interval_seconds
        self._config, self._ranks, self._thread = spec.config, ranks, thread
        thread.work = self._serve
        self._directory = RunDirectory(spec.run_path)
        self._events: queue.Queue[tuple[int, Event]] = queue.Queue()
        """With the number of their start: ranks that were given up may end during the next one."""
        self._starts: queue.Queue[tuple[int, TrainSpec, int]] = queue.Queue()
        self._number = self._serving = 0  # of the newest start, and of that in Ray's thread
        self._killed: frozenset[int] = frozenset()
        self._monitor: ClusterMonitor | None = None
        # Of the ranks of the current start, by rank; empty until they are up.
        self._locations: list[RankLocation] = []
        self._node_ids: frozenset[str] = frozenset()  # alive when the cluster was polled last
        self._waiting_since = time.monotonic()  # for the ranks
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
        self._is_up, self._waiting_since = False, time.monotonic()
        self._number += 1
        self._starts.put((self._number, spec, num_ranks))

    def poll(self) -> list[Event]:
        events: list[Event] = []
        while not self._events.empty():
            number, event = self._events.get()
            if number < self._number:
                continue
            events.append(event)
            if isinstance(event, RanksUp):
                self._is_up = True
            elif isinstance(event, RankEnded):
                self._is_up, self._waiting_since = False, time.monotonic()
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
            raise TxlError(
                f"the ranks did not start within {limit_seconds:g} s (ray.start_timeout_seconds), "
                f"while waiting for {self.waits_for}. Ray's log: {self._directory.logs}/ray.log. "
                "Run the same command again, or use --on processes"
            )
        return events

    def request_stop(self) -> None:
        """Ranks see the stop file, also those that are importing their libraries, once they can."""

    def kill(self, ranks: Collection[int]) -> None:
        self._killed |= frozenset(ranks)

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
                    number, spec, num_ranks = self._starts.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    continue
                self._serving = number
                self._run(spec, num_ranks, resource)

    def _report(self, event: Event) -> None:
        self._events.put((self._serving, event))

    def _run(self, spec: TrainSpec, num_ranks: int, resource: Resource) -> None:
        """One start: reserve, start the actors, and report how each of them ends."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group([{resource: 1}] * num_ranks, strategy="PACK")
        try:
            limit_seconds = RESERVE_SECONDS if self._ranks.is_elastic else math.inf
            if not self._wait(lambda: group.wait(1.0), limit_seconds):
                self._end_all(num_ranks, "the resources of the ranks are not free")
                return
            remote = ray.remote(
                num_cpus=int(resource == "CPU"), num_gpus=int(resource == "GPU"), max_restarts=0
            )(RankActor)
            places = (
                PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
                for bundle in range(num_ranks)
            )
            actors = [remote.options(scheduling_strategy=place).remote() for place in places]
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
            self._report(RankEnded(rank, 1, reason=reason))

    def _call_ranks(
        self, spec: TrainSpec, ranks: list[tuple[RankLocation, Any]], resource: Resource
    ) -> dict[Any, int]:
        """Begin the work of all ranks; returns the call of each rank."""
        locations = [location for location, _ in ranks]
        settings = {
            "spec": spec.to_json(),
            "working_directory": str(Path.cwd()),
            "use_gpu": resource == "GPU",
            "environment": {
                name: value
                for name, value in os.environ.items()
                if name.startswith(COMMUNICATION_VARIABLES) and name not in INTERFACE_VARIABLES
            },
            "nccl_log": str(self._directory.logs / "nccl-%h-%p.log"),
        }
        prepared = [
            actor.prepare.remote(settings, rank, locations) for rank, (_, actor) in enumerate(ranks)
        ]
        # Ray resolves the port when rank 0 has imported its libraries, as the others do meanwhile.
        calls = {
            actor.run.remote(prepared[0], prepared[rank]): rank
            for rank, (_, actor) in enumerate(ranks)
        }
        self._locations = locations
        places = {rank: f" ({location})" for rank, location in enumerate(locations)}
        # A private Ray has one node, which this process would not outlive.
        nodes = {location.node_id for location in locations if not self._thread.is_private}
        self._report(RanksUp(places, nodes))
        return calls

    def _watch(self, calls: dict[Any, int], actors: list[Any]) -> None:
        """Report how each rank ends, until all have or the main thread has given them up."""
        import ray

        while calls and not self._thread.leave.is_set() and self._starts.empty():
            for rank in self._killed & set(calls.values()):
                ray.kill(actors[rank])
            ready, _ = ray.wait(list(calls), timeout=POLL_SECONDS)
            for call in ready:
                self._report(self._end_of(calls.pop(call), call))

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
