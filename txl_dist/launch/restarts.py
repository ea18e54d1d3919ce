"""Restarts: why the ranks of a start ended, whether others start, and how many.

    RankEnded ... -> failure_of -> RunFailure -> RestartBudget -> restart, or raise
    Room ... -> ElasticPlan -> number of ranks

Decisions only; `supervise.py` acts on them, for every launcher.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from data_pipeline.errors import counted
from data_pipeline.system.signals import STOP_SIGNALS
from txl_dist.checkpoint.directory import resume_advice
from txl_dist.errors import OUTAGES, LostRankError, PreemptedError, TxlError
from txl_dist.launch.rank_group import RankEnded, RankRange
from txl_dist.training.spec import RunDirectory

MAX_DELAY_SECONDS = 60.0
"""Longest wait between a failure and the restart."""
MAX_NODE_LOSSES = 10
"""Lost nodes between two checkpoints that do not count as failures. More are no coincidence: the
run may end them."""
SETTLE_SECONDS = 8.0
"""After ranks have ended: a cluster frees their resources, and notices which nodes are dead."""
STABLE_SECONDS = 10.0
"""A node that has just joined may still be starting, or leave again."""


# --- why ranks ended ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunFailure:
    error: TxlError
    event: str
    """The failure without advice, for the line about the restart."""
    can_restart: bool
    """A restart can help: a rank was killed, hung, was lost, or ended without a TxlError; or
    storage has failed after the launch had saved."""


def failure_of(
    ends: Sequence[RankEnded],
    *,
    stop_requested: bool,
    has_saved: bool,
    directory: RunDirectory,
) -> RunFailure | None:
    """The failure that ended the run; None if all ranks succeeded. `has_saved`: the launch has
    written a checkpoint, so what it reads was there.

    One failure usually makes all ranks fail. The first of these that exists is the cause:
    1. a stop request; 2. a rank killed from outside; 3. an error of a rank's own; 4. a rank that
    ended without one; 5. a rank that hung. LostRankError comes last, because it is a consequence of
    another rank's failure.
    """
    failed = [end for end in ends if end.code != 0]
    if not failed:
        return None
    advice, logs = resume_advice(directory.path), f"Logs of all ranks: {directory.logs}"
    killed = [end for end in failed if end.is_killed]
    stops = [end.error for end in failed if isinstance(end.error, PreemptedError)]
    has_stopped = stop_requested and any(end.hung or end.is_dead for end in failed)
    if stops or has_stopped or any(is_stop_code(end.code) for end in failed):
        before = ", before all ranks had saved" if has_stopped else ""
        stop = stops[0] if stops else PreemptedError(f"stopped on request{before}. {advice}")
        return RunFailure(stop, "stopped on request", can_restart=False)
    if killed:
        event = killed[0].death
        error = TxlError(f"{event}; the run stopped. {logs}. {advice}")
        return RunFailure(error, event, can_restart=True)
    own = [end.error for end in failed if not isinstance(end.error, LostRankError | None)]
    if own:
        # Not an outage, if there is another error: it would be repeated.
        error = min(own, key=lambda error: isinstance(error, OUTAGES))
        return RunFailure(error, str(error), can_restart=has_saved and isinstance(error, OUTAGES))
    hung = [f"rank {end.rank}" for end in failed if end.hung]
    unexplained = [end for end in failed if end.error is None and not end.hung]
    if hung and not unexplained:
        event = f"{' and '.join(hung)} hung and {'was' if len(hung) == 1 else 'were'} killed"
    else:
        end = (unexplained or failed)[0]
        reason = f" ({end.reason})" if end.reason else ""
        event = f"rank {end.rank}{end.place} ended with code {end.code}{reason}"
        event = end.death if (end.code or 0) < 0 else event
    consequence = next((str(end.error) for end in failed if end.error is not None), advice)
    return RunFailure(TxlError(f"{event}. {consequence}. {logs}"), event, can_restart=True)


def is_stop_code(code: int | None) -> bool:
    """Whether a rank ended because of a stop request. In its first moments the signal kills it."""
    return code is not None and (code == PreemptedError.exit_code or -code in STOP_SIGNALS)


# --- whether others start -------------------------------------------------------------------------


class RestartBudget:
    """Counts failures since the newest checkpoint grew, and allows `max_restarts` of them.

    A run of weeks with one failure a day therefore never exhausts the budget; ranks that fail
    before they save do. Every reset needs a checkpoint of a later step than all before, so a loop
    that falls back to older checkpoints ends too. A lost node does not count.
    """

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.num_failures = self.num_lost_nodes = 0
        """Since the newest checkpoint grew."""
        self._newest_step = -1

    def count(self, *, newest_step: int | None) -> None:
        """Count a failure; `newest_step` is that of the newest complete checkpoint, if any."""
        if newest_step is not None and newest_step > self._newest_step:
            self._newest_step, self.num_failures, self.num_lost_nodes = newest_step, 0, 0
        self.num_failures += 1

    def forgive_lost_node(self) -> bool:
        """The last failure was that of a node; returns whether it does not count."""
        if self.num_lost_nodes == MAX_NODE_LOSSES:
            return False
        self.num_failures -= 1
        self.num_lost_nodes += 1
        return True

    @property
    def is_exhausted(self) -> bool:
        return self.num_failures > self.max_restarts

    @property
    def delay_seconds(self) -> float:
        """How long to wait before a restart: 0 after one failure without a new checkpoint, then 1,
        2, 4, ... up to MAX_DELAY_SECONDS. A file server or network that failed may work again by
        then.
        """
        count = self.num_failures + self.num_lost_nodes
        return 0.0 if count <= 1 else min(MAX_DELAY_SECONDS, 2.0 ** (count - 2))

    def exhausted_error(self, failure: RunFailure, directory: RunDirectory) -> TxlError:
        if self.max_restarts == 0:
            return failure.error
        return TxlError(
            f"the ranks failed again after {counted(self.max_restarts, 'restart')} without a new "
            "checkpoint (--max-restarts); the last failure: "
            f"{failure.event}. Logs of all ranks: {directory.logs}. {resume_advice(directory.path)}"
        )


# --- how many start -------------------------------------------------------------------------------


class ElasticPlan:
    """How many ranks the next start has, and when running ranks end early for a change.

    With `--ranks N` every start has N ranks. With `--ranks A:B`:

        start    B ranks if they fit now; after SETTLE_SECONDS as many as fit, at least A
        grow     when more ranks have fitted for STABLE_SECONDS, and `growth_interval_seconds` have
                 passed since the last start: a growth costs a restart of all ranks
        shrink   only when ranks are lost, or their node is preempted
    """

    def __init__(self, ranks: RankRange, *, growth_interval_seconds: float) -> None:
        self.ranks = ranks
        self.num_ranks = 0
        """Of the last start."""
        self._growth_interval_seconds = growth_interval_seconds
        self._started_at = self._waiting_since = time.monotonic()
        self._fits_since: float | None = None

    def choose(self, room: int | None) -> int | None:
        """The number of ranks to start now; None if they have to wait. No ranks are running.

        `room`: ranks that fit now; None if that is not known.
        """
        if not self.ranks.is_elastic or (room or 0) >= self.ranks.maximum:
            return self.ranks.maximum
        is_settled = time.monotonic() - self._waiting_since >= SETTLE_SECONDS
        return room if is_settled and (room or 0) >= self.ranks.minimum else None

    def begin(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._started_at, self._fits_since = time.monotonic(), None

    def end(self) -> None:
        self._waiting_since = time.monotonic()

    def growth(self, room: int | None) -> str | None:
        """Why the running ranks should end for a start with more of them, if they should.

        Call it often: it measures for how long more ranks would fit.
        """
        if not room or self.num_ranks >= self.ranks.maximum:
            self._fits_since = None
            return None
        now = time.monotonic()
        if self._fits_since is None:
            self._fits_since = now
        is_stable = now - self._fits_since >= STABLE_SECONDS
        if not is_stable or now - self._started_at < self._growth_interval_seconds:
            return None
        fitting = min(self.num_ranks + room, self.ranks.maximum)
        return f"there is room for {fitting} ranks instead of {self.num_ranks}"
