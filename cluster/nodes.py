"""Nodes of a Ray cluster: what ranks reserve there, what is free and alive; one rank as an actor.

    RankActor.locate    where the actor runs; with all locations ranks are numbered (`order_ranks`)
    RankActor.prepare   the environment of the rank; imports torch and the training code
    RankActor.run       train_rank; returns the TxlError that ended it

It imports no torch at its top: Ray's thread of the launcher imports this module.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import psutil

from cluster.connection import HEAD_SECONDS, responds
from data_pipeline.errors import counted
from txl_dist.errors import ConfigError, TxlError
from txl_dist.runtime.process import free_port

Node = Mapping[str, Any]
"""An entry of `ray.nodes()`."""
Resource = Literal["GPU", "CPU"]


def live_nodes() -> list[Node]:
    """The nodes of the connected cluster that are alive."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def choose_resource(gpus_per_rank: int | None, nodes: Sequence[Node], num_ranks: int) -> Resource:
    """What each rank or worker reserves: a GPU if `nodes` have any, or a CPU.

    `gpus_per_rank` is that of `RayConfig`. If it is 1, Ray waits for nodes that have GPUs; if it is
    None, raises ConfigError if `nodes` have some GPUs, but too few.
    """
    if gpus_per_rank is not None:
        return "GPU" if gpus_per_rank else "CPU"
    num_gpus = int(sum(node["Resources"].get("GPU", 0) for node in nodes))
    if 0 < num_gpus < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks or workers need a GPU each, and Ray has {num_gpus}. Start at most "
            f"{num_gpus}, or use CPUs: ray.gpus_per_rank=0, or CUDA_VISIBLE_DEVICES= before the "
            "command. If more nodes of a cluster are about to start: ray.gpus_per_rank=1"
        )
    return "GPU" if num_gpus else "CPU"


POLL_SECONDS = 2.0
SUSPENDED_SECONDS = 10.0
"""A caller that has not asked for this long was suspended (Ctrl-Z, or the whole machine)."""
_JOIN_SECONDS = 5.0


@dataclass(frozen=True)
class ClusterState:
    """The state of a cluster at one time."""

    node_ids: frozenset[str]
    """Nodes that are alive."""
    total: float
    """CPUs of the cluster, or GPUs if the ranks use GPUs."""
    free: float
    num_free_slots: int = 0
    """How many more ranks could start now, on nodes that are not draining."""
    deadlines: Mapping[str, float | None] = field(default_factory=dict)
    """Nodes that are draining, because they are preempted or shut down: seconds that were left
    when this state was read; None if the time is not known."""


class ClusterMonitor:
    """Polls the cluster while the context is open. Open it while connected to Ray.

    A thread asks Ray, because the calls may never return. The main thread reads the newest result
    and stays free to handle signals.
    """

    def __init__(self, resource: Resource) -> None:
        """`resource`: what each rank or worker reserves one of."""
        import ray

        self.resource = resource
        self.state: ClusterState | None = None
        self.head = str(ray.get_runtime_context().gcs_address)
        self._last_response = self._last_question = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="cluster-monitor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_JOIN_SECONDS)

    @property
    def is_head_lost(self) -> bool:
        """Whether the head node has not responded for HEAD_SECONDS. For callers that poll: time for
        which the whole process was suspended does not count.
        """
        now = time.monotonic()
        if now - self._last_question > SUSPENDED_SECONDS:
            self._last_response = now
        self._last_question = now
        return now - self._last_response > HEAD_SECONDS

    def lost_head_error(self, advice: str) -> TxlError:
        """The error for a head node that does not respond; `advice` says how to continue."""
        return TxlError(
            f"the head of the Ray cluster at {self.head} does not respond: its node or network "
            f"failed, which ends the processes of all nodes. Start the cluster again. {advice}"
        )

    def describe_wait(self, num: int, name: str) -> str:
        """`CPUs: 2 ranks need one each, the cluster has 1, of which 0 are free`.

        `num`: how many more of `name` (`rank`, `worker`) have to start.
        """
        if self.state is None:
            return "Ray's list of nodes"
        needs = "needs one" if num == 1 else "need one each"
        return (
            f"{self.resource}s: {counted(num, name)} {needs}, the cluster has "
            f"{self.state.total:g}, of which {self.state.free:g} are free"
        )

    def _poll(self) -> None:
        import ray

        while True:
            if responds(self.head):
                self._last_response = time.monotonic()
                # If the head died after it responded, the state stays.
                with suppress(ray.exceptions.RayError, RuntimeError):
                    self.state = _read_state(self.resource)
            if self._stop.wait(POLL_SECONDS):
                return


def _read_state(resource: Resource) -> ClusterState:
    import ray

    # Ray 2.60 has no public function for this one and `get_draining_nodes`. Ray Train's preemption
    # watcher uses the second.
    free_by_node = ray._private.state.available_resources_per_node()
    deadlines_ms: dict[str, int] = ray._private.state.state.get_draining_nodes()
    nodes, now = live_nodes(), time.time()
    # A node that is listed, but has no free resources yet, has just joined.
    free = {
        node["NodeID"]: free_by_node.get(node["NodeID"], {}).get(resource, 0.0) for node in nodes
    }
    return ClusterState(
        node_ids=frozenset(free),
        total=sum(node["Resources"].get(resource, 0.0) for node in nodes),
        free=sum(free.values()),
        num_free_slots=sum(int(free[node_id]) for node_id in free.keys() - deadlines_ms.keys()),
        deadlines={
            node_id: max(0.0, deadline_ms / 1000 - now) if deadline_ms else None
            for node_id, deadline_ms in deadlines_ms.items()
        },
    )


# --- one rank -------------------------------------------------------------------------------------


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
        use_interface_of(own.address)
        os.chdir(settings["working_directory"])  # the config may have relative paths
        self._settings, self._own, self._num_peers = settings, own, len(peers)

        import txl_dist.training.rank  # noqa: F401  # seconds, which all ranks spend at once

        return free_port(own.address)

    def run(self, port: int) -> TxlError | None:
        """Train until the run ends; returns the error that ended it. `port` is that of rank 0."""
        import torch

        from data_pipeline.system.signals import StopSignals, unblock_stop_signals
        from txl_dist.runtime.stop import exit_before_first_step
        from txl_dist.runtime.world import World
        from txl_dist.training.rank import train_rank
        from txl_dist.training.spec import TrainSpec

        os.environ["MASTER_PORT"] = str(port)
        spec = TrainSpec.from_json(self._settings["spec"])
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
    # Ray knows the limit of a container and what the administrator has set, this machine only all.
    num_cpus = os.cpu_count() or 1
    usable = min(num_cpus, int(ray_cpus)) if ray_cpus else num_cpus
    return max(1, usable // ranks_on_node)


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
