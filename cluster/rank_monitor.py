"""RankMonitor: where the ranks of a launch run, and which of them have failed.

Reads the launch files (`txl_dist/launch/launch_files.py`), which ranks and Ray Train's controller
write. A failure is reported in one line: rank, node, process, and whether it counts against the
restarts (`failure_counter.py`).
"""

import logging
import time
from dataclasses import replace

from cluster.failure_counter import NODE_LOSS_SECONDS, FailureCounter
from cluster.nodes import ClusterMonitor
from txl_dist.launch.launch_files import LaunchFiles, RankFailure, RankLocation

log = logging.getLogger("ray.txl")


class RankMonitor:
    """The ranks of the current start. `cluster` is set once Ray is connected."""

    def __init__(self, files: LaunchFiles, counter: FailureCounter) -> None:
        self.cluster: ClusterMonitor | None = None
        self.locations: dict[int, RankLocation] = {}
        """Filled once all ranks have started; empty again after they have ended."""
        self.has_failed = False
        """Whether a rank has failed since the launch began."""
        self._files, self._counter = files, counter
        self._failure: tuple[float, RankFailure] | None = None
        """A failure that is not yet reported, and when it was read."""

    def read(self, num_ranks: int, *, is_stopping: bool) -> None:
        """Read what is new in the launch files. A failure of ranks that are asked to stop does not
        count.
        """
        if not self.locations and self._failure is None:
            locations = self._files.locations(num_ranks)
            if len(locations) == num_ranks:
                self.locations = locations
        for failure in self._files.new_failures():
            for rank, text in failure.errors.items():
                log.warning("rank %d: %s", rank, text)
            self._failure = time.monotonic(), failure
            if not failure.is_preemption and not is_stopping:
                self._counter.add(self._describe_failure(failure), node_ids=self.node_ids)
            self._files.remove_locations()  # before other ranks write theirs

    @property
    def are_running(self) -> bool:
        """Whether all ranks have started, and no failure is known."""
        return bool(self.locations) and self._failure is None

    def begin(self, *, is_change: bool) -> None:
        """Other ranks start. A failure of ranks that ended for a change is not reported."""
        self._files.remove_locations()
        if is_change:
            self._failure = None
        if self._failure is None:  # else its report needs the locations
            self.locations = {}

    def take_failure(self) -> str | None:
        """The newest failure in words, as soon as its cause is known; each is returned once."""
        if self._failure is None or self._files.error() is not None:
            return None
        since, failure = self._failure
        # When a node dies, Ray Train reports an error of the surviving ranks first. The node's
        # death explains it, and Ray notices that some seconds later.
        failure = replace(failure, died=self._ranks_on_dead_nodes() or failure.died)
        if not failure.died and time.monotonic() - since < NODE_LOSS_SECONDS:
            return None
        event = self._describe_failure(failure)
        self._failure, self.locations, self.has_failed = None, {}, True
        return event

    @property
    def node_ids(self) -> frozenset[str]:
        """The nodes on which ranks run."""
        return frozenset(location.node_id for location in self.locations.values())

    def preempted_node(self) -> str | None:
        """A node with ranks that is draining, in words; None if there is none."""
        deadlines = self.cluster.state.deadlines if self.cluster and self.cluster.state else {}
        for location in self.locations.values():
            if location.node_id in deadlines:
                return describe_draining(location.address, deadlines[location.node_id])
        return None

    def _describe_failure(self, failure: RankFailure) -> str:
        if failure.died:
            return " and ".join(f"{self._describe_rank(rank)} died" for rank in failure.died)
        rank, text = next(iter(failure.errors.items()))
        return f"{self._describe_rank(rank)} failed ({text.splitlines()[0]})"

    def _describe_rank(self, rank: int) -> str:
        location = self.locations.get(rank)
        return f"rank {rank}" + (
            f" (node {location.address}, pid {location.pid})" if location else ""
        )

    def _ranks_on_dead_nodes(self) -> tuple[int, ...]:
        state = self.cluster.state if self.cluster else None
        if state is None:
            return ()
        return tuple(
            rank
            for rank, location in self.locations.items()
            if location.node_id not in state.node_ids
        )


def describe_draining(address: str, seconds: float | None) -> str:
    """`node 10.0.0.2 is preempted in 58 s`."""
    return f"node {address} is preempted " + ("soon" if seconds is None else f"in {seconds:.0f} s")
