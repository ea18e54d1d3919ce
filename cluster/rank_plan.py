"""RankPlan: how many ranks the next start has, and when running ranks end early for a change.

Decisions only, from the state of the cluster; `supervisor.py` acts on them. With `--ranks N` every
start has N ranks, and Ray waits for their resources. With `--ranks A:B`:

    start    B ranks if they fit now; after SETTLE_SECONDS as many as fit, at least A
    grow     when more ranks have fitted for STABLE_SECONDS, and `ray.growth_interval_seconds` have
             passed since the last start: a growth costs a restart of all ranks
    shrink   only when ranks are lost, or their node is preempted

Before a change the ranks save, so it loses no step. Ray Train can resize by itself (2.60), but it
ends the ranks without notice; see docs/decisions/0026-elastic-ranks-and-preemption.md.
"""

import time

from cluster.nodes import ClusterState
from txl_dist.launch.rank_range import RankRange

SETTLE_SECONDS = 8.0
"""After ranks have ended: Ray frees their resources, and notices which nodes are dead."""
STABLE_SECONDS = 10.0
"""A node that has just joined may still be starting, or leave again."""


class RankPlan:
    """The number of ranks of one launch."""

    def __init__(self, ranks: RankRange, *, growth_interval_seconds: float) -> None:
        self.ranks = ranks
        self.num_ranks = 0
        """Number of ranks of the last start."""
        self._growth_interval_seconds = growth_interval_seconds
        self._started_at = self._waiting_since = time.monotonic()
        self._fits_since: float | None = None

    def choose(self, state: ClusterState | None) -> int | None:
        """The number of ranks to start now; None if they have to wait. No ranks are running."""
        if not self.ranks.is_elastic:
            return self.ranks.maximum
        if state is None:
            return None
        if state.num_free_slots >= self.ranks.maximum:
            return self.ranks.maximum
        if time.monotonic() - self._waiting_since < SETTLE_SECONDS:
            return None
        fits = state.num_free_slots >= self.ranks.minimum
        return state.num_free_slots if fits else None

    def begin(self, num_ranks: int) -> None:
        """These ranks start now."""
        self.num_ranks = num_ranks
        self._started_at, self._fits_since = time.monotonic(), None

    def end(self) -> None:
        """The ranks have ended, and others will start."""
        self._waiting_since = time.monotonic()

    def growth(self, state: ClusterState | None) -> str | None:
        """Why the running ranks should end for a start with more of them; None if they should not.

        Call it often: it measures for how long more ranks would fit.
        """
        if state is None or self.num_ranks >= self.ranks.maximum or not state.num_free_slots:
            self._fits_since = None
            return None
        now = time.monotonic()
        if self._fits_since is None:
            self._fits_since = now
        is_stable = now - self._fits_since >= STABLE_SECONDS
        if not is_stable or now - self._started_at < self._growth_interval_seconds:
            return None
        fitting = min(self.num_ranks + state.num_free_slots, self.ranks.maximum)
        return f"there is room for {fitting} ranks instead of {self.num_ranks}"
