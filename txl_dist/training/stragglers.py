"""Stragglers: which rank is slower than the others, and with what.

All ranks need the same time per step, because they wait for each other in collectives. So this
module compares only the time that a rank spends before the first collective of a step: the data
wait and the forward. At ZeRO stage 3 the forward gathers parameters, so only the data wait is
compared. On GPUs the forward is the time to start its kernels, not to execute them
(`activity.py`): a slow data pipeline or host is found there, a slow GPU is not.
"""

import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from txl_dist.runtime.activity import Span
from txl_dist.runtime.world import World

INTERVAL_SECONDS = 60.0
MIN_RATIO = 1.2
"""The slowest rank is reported if its own time is this multiple of the median of all ranks ..."""
MIN_SHARE = 0.05
"""... and the difference is at least this share of the time of all steps."""


@dataclass(frozen=True, slots=True)
class RankTime:
    """The time of one rank since the last comparison."""

    host: str
    seconds: dict[str, float]
    """The rank's own time, by span."""
    total_seconds: float


class StragglerCheck:
    """Compares the ranks about once per minute. `compare` is collective."""

    def __init__(self, world: World, *, zero_stage: int) -> None:
        self._world, self._activity = world, world.activity
        self._spans = (Span.DATA_WAIT,) if zero_stage == 3 else (Span.DATA_WAIT, Span.FORWARD)
        self._host = socket.gethostname()
        self._begin()

    @property
    def is_due(self) -> bool:
        """Whether this rank would compare now. Clocks differ, so the ranks have to agree first."""
        return self._world.num_ranks > 1 and time.monotonic() - self._since >= INTERVAL_SECONDS

    def compare(self) -> str | None:
        """A line about the slowest rank, if it is much slower than the median. Collective."""
        own = self._activity.seconds()
        seconds = {span.value: own[span] - self._before[span] for span in self._spans}
        total_seconds = time.monotonic() - self._since
        times = self._world.all_gather(RankTime(self._host, seconds, total_seconds))
        self._begin()
        return describe_slowest(times)

    def _begin(self) -> None:
        self._before = self._activity.seconds()
        self._since = time.monotonic()


def describe_slowest(times: Sequence[RankTime]) -> str | None:
    """`slowest rank 3 (a): 1.42 x the median, in data wait`; None if the ranks are about equal.

    The span is the one in which the rank differs most from the median of all ranks.
    """
    own = [sum(rank.seconds.values()) for rank in times]
    # The lower of the two middle values: with two ranks that is the faster one.
    median = statistics.median_low(own)
    slowest = max(range(len(own)), key=own.__getitem__)
    excess = own[slowest] - median
    rank = times[slowest]
    if own[slowest] < MIN_RATIO * median or excess < MIN_SHARE * rank.total_seconds:
        return None
    excess_by_span = {
        span: seconds - statistics.median_low([other.seconds[span] for other in times])
        for span, seconds in rank.seconds.items()
    }
    span = max(excess_by_span, key=excess_by_span.__getitem__)
    ratio = own[slowest] / max(median, 1e-9)
    times_median = f"{ratio:.2f} x the median" if ratio < 100 else "over 100 x the median"
    return (
        f"slowest rank {slowest} ({rank.host}): {times_median}, in {span}; the others wait "
        f"{excess / rank.total_seconds:.0%} of the time for it"
    )
