"""The ranks of one launch: RankGroup starts, reports and kills them; `poll` gives events.

A launcher has a group of its own (launcher.py), and supervise.py decides by its events.
"""

import re
import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

from txl_dist.errors import ConfigError, TxlError
from txl_dist.training.spec import TrainSpec

OnLine = Callable[[str], None]
"""Called with every line that rank 0 logs, soon after it is written."""
_RANKS = re.compile(r"([1-9]\d{0,5})(?::([1-9]\d{0,5}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class RankRange:
    """The value of `--ranks`: from `minimum` to `maximum` ranks, both included."""

    minimum: int
    maximum: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `N` or `A:B`. Raises ConfigError."""
        match = _RANKS.fullmatch(text.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if low > high:
            raise ConfigError(
                f"--ranks {text}: expected a number such as 4, or a range such as 2:8 (at least 2 "
                "ranks, and up to 8 while the cluster has room for them)"
            )
        return cls(low, high)

    @property
    def is_elastic(self) -> bool:
        """Whether the number of ranks may change during a run."""
        return self.minimum < self.maximum

    def __str__(self) -> str:
        return f"{self.minimum}:{self.maximum}" if self.is_elastic else str(self.maximum)


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RanksUp:
    """All processes of a start exist."""

    places: Mapping[int, str]
    """For messages, by rank: ` (node 10.0.0.2, pid 101)`, or nothing."""
    nodes: Collection[str] = ()
    """Ids of their nodes, if a node can be lost without the launcher."""


@dataclass(frozen=True, slots=True)
class RankEnded:
    """The process of a rank has ended, or its work has."""

    rank: int
    code: int | None
    """Exit code, or minus the number of the signal that killed it. None: killed, it is not known
    by what."""
    error: TxlError | None = None
    """The error that the rank raised."""
    reason: str = ""
    """Any other error, in one line."""
    hung: bool = False
    """Set by the supervisor, which has killed a rank that did not end after a failure or a stop."""
    place: str = ""
    """Set by the supervisor: that of `RanksUp.places`."""

    @property
    def is_dead(self) -> bool:
        """Whether something else than the launcher killed it."""
        return not self.hung and (self.code is None or self.code < 0)

    @property
    def is_killed(self) -> bool:
        """The same, but not NCCL, which aborts a rank that waits for one that has failed."""
        return self.is_dead and self.code != -signal.SIGABRT

    @property
    def death(self) -> str:
        """`rank 1 (node a, pid 5) died`."""
        how = f"was killed by {signal.Signals(-self.code).name}" if self.code else "died"
        return f"rank {self.rank}{self.place} {how}"


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node of ranks is dead. May come some seconds after their RankEnded."""

    node: str


@dataclass(frozen=True, slots=True)
class Room:
    """Elastic runs: how many more ranks could start now."""

    num_ranks: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """A node of ranks will be preempted; the ranks can continue on other nodes."""

    reason: str
    """`node 10.0.0.2 is preempted in 58 s`."""


Event = RanksUp | RankEnded | NodeLost | Room | Preempted


# --- the group ------------------------------------------------------------------------------------


class RankGroup(Protocol):
    """The processes of the ranks of one launch. Methods return immediately."""

    max_restarts: int
    """Restarts after failures, without --max-restarts."""
    waits_for: str
    """What a start waits for until its ranks are up; printed now and then."""
    growth_interval_seconds: float
    """Elastic runs: least time from a start to one with more ranks, which restarts all."""

    def start(self, spec: TrainSpec, num_ranks: int) -> None:
        """Start ranks 0 to `num_ranks` - 1; those of earlier starts have ended or are given up.

        Each calls `train_rank(spec, world)` and logs to RUN/logs/rank-N.log.
        """

    def poll(self) -> list[Event]:
        """What has happened since the last call. Each rank of a start ends once.

        Raises the TxlError after which no rank can run any more.
        """

    def request_stop(self) -> None:
        """Ask ranks to stop that may not see the stop file yet (`TrainSpec.stop_file`)."""

    def kill(self, ranks: Collection[int]) -> None:
        """End these ranks without saving. Called again until they have ended."""
