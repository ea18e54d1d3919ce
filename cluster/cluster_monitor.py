"""ClusterMonitor: the nodes and resources of a Ray cluster, and whether its head node responds.

A thread asks Ray, because the calls may never return. The main thread reads the newest result and
stays free to handle signals.
"""

import threading
import time
from dataclasses import dataclass
from typing import Self

from cluster.address import responds

POLL_SECONDS = 2.0
_JOIN_SECONDS = 5.0


@dataclass(frozen=True)
class ClusterState:
    """The state of a cluster at one time."""

    node_ids: frozenset[str]
    """Nodes that are alive."""
    total: float
    """CPUs of the cluster, or GPUs if the ranks use GPUs."""
    free: float


class ClusterMonitor:
    """Polls the cluster while the context is open. Open it while connected to Ray."""

    def __init__(self, *, use_gpu: bool, restrictions: str = "") -> None:
        import ray

        self.resource = "GPU" if use_gpu else "CPU"
        self.restrictions = restrictions
        """Settings that restrict the nodes of ranks, for messages."""
        self.state: ClusterState | None = None
        self.head = str(ray.get_runtime_context().gcs_address)
        self._last_response = time.monotonic()
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
        """Time since the last response of the head node."""
        return time.monotonic() - self._last_response

    def describe_wait(self, num_ranks: int) -> str:
        """What the ranks are waiting for before they start."""
        if self.silent_seconds > 3 * POLL_SECONDS:
            return f"the head of the Ray cluster at {self.head}, which does not respond"
        if self.state is None:
            return "Ray's list of nodes"
        need = f"{num_ranks} ranks need a {self.resource} each"
        need += f" (with {self.restrictions})" if self.restrictions else ""
        total, free, num_nodes = self.state.total, self.state.free, len(self.state.node_ids)
        if total < num_ranks:
            return (
                f"resources: {need}, the cluster has {total:g} on {num_nodes} live nodes. Add a "
                "node, or start again with fewer --ranks"
            )
        return f"the ranks to start: {need}, the cluster has {total:g}, of which {free:g} are free"

    def _poll(self) -> None:
        import ray

        while not self._stop.wait(POLL_SECONDS):
            if not responds(self.head):
                continue
            self._last_response = time.monotonic()
            try:
                nodes = [node for node in ray.nodes() if node["Alive"]]
                free = ray.available_resources().get(self.resource, 0.0)
            except (ray.exceptions.RayError, RuntimeError):
                continue  # the head died after it responded
            self.state = ClusterState(
                node_ids=frozenset(node["NodeID"] for node in nodes),
                total=sum(node["Resources"].get(self.resource, 0.0) for node in nodes),
                free=free,
            )
