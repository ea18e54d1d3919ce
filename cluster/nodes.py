"""Nodes of a Ray cluster: where ranks are placed, what is free and alive, the interface of a node.

Ray places ranks by resources. "At most k ranks on a node" is not among its strategies. So, if GPUs
or CPUs allow more than k, every rank reserves 1/k of a node's host memory as Ray counts it. Then
Ray cannot place more, also after a node was lost and replaced. This is bookkeeping only: Ray does
not limit the host memory of a process.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import psutil

from cluster.connection import responds
from txl_dist.config.training_config import RayConfig
from txl_dist.errors import ConfigError

NODE_ID_LABEL = "ray.io/node-id"
"""Label that Ray gives to every node."""
_HEAD_RESOURCE = "node:__internal_head__"

Node = Mapping[str, Any]
"""An entry of `ray.nodes()`."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where ranks may run, and what each reserves."""

    use_gpu: bool
    resources: Mapping[str, float]
    """What a rank reserves."""
    labels: Mapping[str, str]
    """Ray's label selector: what the nodes of ranks must have, or must not have."""
    restrictions: str = ""
    """The settings that restrict the nodes of ranks, for messages."""

    def max_ranks(self, node: Node) -> int:
        """How many ranks fit on a node on which nothing else runs."""
        return self.num_slots(node, node["Resources"])

    def num_slots(self, node: Node, free: Mapping[str, float]) -> int:
        """How many ranks fit into the free resources of a node."""
        if not _matches(node, self.labels):
            return 0
        return min(int(free.get(name, 0) // amount) for name, amount in self.resources.items())


def place_ranks(config: RayConfig, num_ranks: int, *, is_private: bool) -> Placement:
    """The placement on the connected cluster. Raises ConfigError if it cannot hold the ranks.

    A private Ray has one node, its head, without labels: settings about nodes do not apply to it.
    """
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    if not is_private:
        return choose_placement(config, nodes, num_ranks)
    config = config.model_copy(
        update={"ranks_on_head": True, "ranks_per_node": None, "node_labels": {}}
    )
    placement = choose_placement(config, nodes, num_ranks)
    if placement.max_ranks(nodes[0]) < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks need {dict(placement.resources)} each, and this machine has "
            f"{nodes[0]['Resources'].get('GPU', 0):g} GPUs. Start fewer ranks, set "
            "ray.gpus_per_rank=null, or use a cluster: --on ADDRESS"
        )
    return placement


def choose_placement(config: RayConfig, nodes: Sequence[Node], num_ranks: int) -> Placement:
    """The placement on `nodes`. Raises ConfigError if a wait for resources would never end."""
    labels = dict(config.node_labels)
    if not config.ranks_on_head:
        head = next((node for node in nodes if _HEAD_RESOURCE in node["Resources"]), None)
        if head is not None:
            labels[NODE_ID_LABEL] = f"!{head['NodeID']}"
    nodes = [node for node in nodes if _matches(node, labels)]
    gpus = _gpus_per_rank(config, nodes, num_ranks)
    resources: dict[str, float] = {}
    if gpus:
        resources["GPU"] = gpus
    if config.cpus_per_rank is not None or not gpus:
        resources["CPU"] = config.cpus_per_rank or 1
    restrictions = ", ".join(
        f"ray.{name}={value}"
        for name, value in config.model_dump().items()
        if name in ("ranks_per_node", "ranks_on_head", "node_labels")
        and value != RayConfig.model_fields[name].default
    )
    placement = Placement(bool(gpus), resources, labels, restrictions)
    limit = config.ranks_per_node
    if limit is None or (nodes and max(map(placement.max_ranks, nodes)) <= limit):
        return placement
    return replace(placement, resources={**resources, "memory": _memory_share(nodes, limit)})


def _matches(node: Node, selector: Mapping[str, str]) -> bool:
    """Whether Ray's label selector admits the node: `a`, `!a`, `in(a,b)` or `!in(a,b)` by label."""
    for label, condition in selector.items():
        text = condition.removeprefix("!")
        values = text[3:-1].split(",") if text.startswith("in(") else [text]
        is_one_of_them = node["Labels"].get(label) in values
        if is_one_of_them == condition.startswith("!"):
            return False
    return True


def _gpus_per_rank(config: RayConfig, nodes: Sequence[Node], num_ranks: int) -> int:
    """GPUs of a rank. Raises ConfigError if the cluster has some, but too few."""
    if config.gpus_per_rank is not None:
        return config.gpus_per_rank  # the nodes may still have to start: Ray waits for them
    num_gpus = int(sum(node["Resources"].get("GPU", 0) for node in nodes))
    if 0 < num_gpus < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks need one GPU each, and Ray has {num_gpus} where ranks may run. "
            f"Start at most {num_gpus} ranks, or use CPUs: ray.gpus_per_rank=0. If more nodes are "
            "about to start: ray.gpus_per_rank=1"
        )
    return 1 if num_gpus else 0


def _memory_share(nodes: Sequence[Node], ranks_per_node: int) -> int:
    """Bytes of memory that at most `ranks_per_node` ranks can reserve on any of the nodes."""
    sizes = [size for node in nodes if (size := int(node["Resources"].get("memory", 0)))]
    if not sizes:
        raise ConfigError(
            f"ray.ranks_per_node={ranks_per_node}: Ray has no node for ranks yet, so their share "
            "of a node is unknown. Start the nodes first, or set it to null"
        )
    share = min(sizes) // ranks_per_node
    if max(sizes) // share > ranks_per_node:
        raise ConfigError(
            f"ray.ranks_per_node={ranks_per_node}: the memory of the nodes differs too much "
            f"({min(sizes) / 2**30:.1f} to {max(sizes) / 2**30:.1f} GiB as Ray counts it). Start "
            "all nodes with the same ray start --memory BYTES, or choose similar ones by "
            "ray.node_labels"
        )
    return share


def num_threads(*, ranks_on_node: int, cpus_per_rank: int | None, ray_cpus: float) -> int:
    """Threads of a rank on this node. `ray_cpus` is what the node offers to Ray; 0: unknown."""
    if cpus_per_rank is not None:
        return cpus_per_rank
    # Ray knows the limit of a container and what the administrator has set, this machine only all.
    num_cpus = os.cpu_count() or 1
    usable = min(num_cpus, int(ray_cpus)) if ray_cpus else num_cpus
    return max(1, usable // ranks_on_node)


POLL_SECONDS = 2.0
SUSPENDED_SECONDS = 10.0
"""A caller that has not asked for this long was suspended (Ctrl-Z, or the whole machine)."""
LONG_START_SECONDS = 60.0
"""Ranks that had room and have not started after this time may have lost it to other work."""
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

    def __init__(self, *, use_gpu: bool, placement: Placement | None = None) -> None:
        """`placement` of ranks; None: each takes one GPU or CPU of any node."""
        import ray

        self.resource = "GPU" if use_gpu else "CPU"
        self.placement = placement or Placement(use_gpu, {self.resource: 1}, {})
        self.state: ClusterState | None = None
        self._most_free_slots = 0
        """Most ranks for which there was room at any time."""
        context = ray.get_runtime_context()
        self.head = str(context.gcs_address)
        self.own_node_id = str(context.get_node_id())
        """The node of the launcher."""
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
    def silent_seconds(self) -> float:
        """Time since the last response of the head node. For callers that poll: time for
        which the whole process was suspended does not count.
        """
        now = time.monotonic()
        if now - self._last_question > SUSPENDED_SECONDS:
            self._last_response = now
        self._last_question = now
        return now - self._last_response

    def describe_wait(self, num_ranks: int, *, waited_seconds: float = 0.0) -> str:
        """What the ranks are waiting for before they start. `num_ranks`: the fewest that may."""
        if self.silent_seconds > 3 * POLL_SECONDS:
            return f"the head of the Ray cluster at {self.head}, which does not respond"
        if self.state is None:
            return "Ray's list of nodes"
        need = f"{num_ranks} ranks need a {self.resource} each"
        if restrictions := self.placement.restrictions:
            need += f" (with {restrictions})"
        total, free, num_nodes = self.state.total, self.state.free, len(self.state.node_ids)
        if total < num_ranks:
            return (
                f"resources: {need}, the cluster has {total:g} on {num_nodes} live nodes. Add a "
                "node, or start again with fewer --ranks"
            )
        # If there was room, the ranks themselves have taken it: they import their libraries.
        if self._most_free_slots >= num_ranks and waited_seconds < LONG_START_SECONDS:
            return "the ranks to start"
        return (
            f"the ranks to start. Other work may have taken the resources: {need}, and {free:g} of "
            f"the {total:g} of the cluster are free"
        )

    def _see(self, state: ClusterState) -> None:
        self.state = state
        self._most_free_slots = max(self._most_free_slots, state.num_free_slots)

    def _poll(self) -> None:
        import ray

        while True:
            if responds(self.head):
                self._last_response = time.monotonic()
                # If the head died after it responded, the state stays.
                with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
                    self._see(_read_state(self.resource, self.placement))
            if self._stop.wait(POLL_SECONDS):
                return


def _read_state(resource: str, placement: Placement) -> ClusterState:
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    free_by_node = _free_by_node()
    deadlines = _draining_nodes()
    # A node that is listed, but has no free resources yet, has just joined.
    free = [free_by_node.get(node["NodeID"], {}) for node in nodes]
    return ClusterState(
        node_ids=frozenset(node["NodeID"] for node in nodes),
        total=sum(node["Resources"].get(resource, 0.0) for node in nodes),
        free=sum(resources.get(resource, 0.0) for resources in free),
        num_free_slots=sum(
            placement.num_slots(node, resources)
            for node, resources in zip(nodes, free, strict=True)
            if node["NodeID"] not in deadlines
        ),
        deadlines=deadlines,
    )


# Ray 2.60 has no public function for these two. Ray Train's preemption watcher uses the second.


def _free_by_node() -> dict[str, dict[str, float]]:
    import ray

    free: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()
    return free


def _draining_nodes() -> dict[str, float | None]:
    import ray

    state: Any = ray._private.state.state
    deadlines_ms: dict[str, int] = state.get_draining_nodes()
    now = time.time()
    return {
        node: max(0.0, deadline_ms / 1000 - now) if deadline_ms else None
        for node, deadline_ms in deadlines_ms.items()
    }


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
        for entry in entries:
            # An IPv6 address may end with its interface: fe80::1%eth0.
            is_ip = entry.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and entry.address.partition("%")[0] == address:
                return name
    return None
