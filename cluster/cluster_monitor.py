"""ClusterMonitor: the nodes and resources of a Ray cluster, and whether its head node responds.

A thread asks Ray, because the calls may never return. The main thread reads the newest result and
stays free to handle signals.
"""

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from cluster.address import responds
from cluster.placement import Placement

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
    """Polls the cluster while the context is open. Open it while connected to Ray."""

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


# Ray 2.60 has no public function for these two. Ray Train's own preemption watcher uses the second.


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
