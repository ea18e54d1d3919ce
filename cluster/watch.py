"""ClusterWatch: what a Ray cluster has, and whether it still answers.

Questions to Ray are asked in a thread, because their answers may never come: the main thread reads
the last one, and stays free for signals.
"""

import threading
import time
from dataclasses import dataclass
from typing import Self

from cluster.address import answers

LOOK_SECONDS = 2.0
_END_SECONDS = 5.0


@dataclass(frozen=True)
class ClusterState:
    """One answer."""

    node_ids: frozenset[str]
    """Nodes that live."""
    total: float
    """CPUs, or GPUs, of the cluster."""
    free: float


class ClusterWatch:
    """Asks Ray every few seconds while the context is open, which lies inside a Ray session."""

    def __init__(self, *, use_gpu: bool) -> None:
        import ray

        self.resource = "GPU" if use_gpu else "CPU"
        self.state: ClusterState | None = None
        self.head = str(ray.get_runtime_context().gcs_address)
        self._answered = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="cluster-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_END_SECONDS)

    @property
    def silent_seconds(self) -> float:
        """How long the head node has not answered."""
        return time.monotonic() - self._answered

    def waiting_for(self, num_ranks: int) -> str:
        """Why the ranks may not have started yet."""
        if self.silent_seconds > 3 * LOOK_SECONDS:
            return f"the head of the Ray cluster at {self.head}, which does not answer"
        if self.state is None:
            return "Ray's account of its nodes"
        needed = f"{num_ranks} ranks need a {self.resource} each"
        total, free, num_nodes = self.state.total, self.state.free, len(self.state.node_ids)
        if total < num_ranks:
            return (
                f"resources: {needed}, the {num_nodes} living nodes of the cluster have {total:g}. "
                "Add a node, or start again with fewer --ranks"
            )
        return f"the ranks to start: {needed}, the cluster has {total:g}, {free:g} of them free"

    def _look(self) -> None:
        import ray

        while not self._stop.wait(LOOK_SECONDS):
            if not answers(self.head):
                continue
            self._answered = time.monotonic()
            try:
                nodes = [node for node in ray.nodes() if node["Alive"]]
                free = ray.available_resources().get(self.resource, 0.0)
            except (ray.exceptions.RayError, RuntimeError):
                continue  # between its head's death and our noticing it
            self.state = ClusterState(
                node_ids=frozenset(node["NodeID"] for node in nodes),
                total=sum(node["Resources"].get(self.resource, 0.0) for node in nodes),
                free=free,
            )
