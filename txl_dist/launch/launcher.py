"""What a launcher is: it starts the ranks of a run, says how they ended, and kills them.

    find_launcher(on) -> Launcher.train -> supervise.py, which decides everything
                         Launcher.rank_group -> RankGroup: start, poll, request_stop, kill
                                                poll -> events (RanksUp, RankEnded, NodeLost, ...)

A launcher is an entry point of group `txl.launchers`, selected by `txl train --on NAME`.
`processes` and `ray` are part of this project; `ray` is in `cluster`, which this package must not
import. Under torchrun no launcher is used. To add one: docs/how_to/add_a_launcher.md.
"""

import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Protocol, Self

from txl_dist.errors import ConfigError, TxlError
from txl_dist.training.spec import TrainSpec

if TYPE_CHECKING:
    from data_pipeline.system.workers import Workers
    from txl_dist.launch.doctor import DoctorRequest, Finding

GROUP = "txl.launchers"
OURS = {
    "processes": "txl_dist.launch.processes:ProcessLauncher",
    "ray": "cluster.launcher:RayLauncher",
}
OF_ADDRESSES = "ray"
"""The launcher of `--on HOST:PORT`, a running cluster."""
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
    def is_killed(self) -> bool:
        """Whether something else than the launcher killed it."""
        return not self.hung and (self.code is None or self.code < 0)

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


# --- launchers ------------------------------------------------------------------------------------


class Launcher(ABC):
    """Built with what follows a colon in `--on NAME:REST`, if anything does."""

    @abstractmethod
    def rank_group(self, spec: TrainSpec, ranks: RankRange) -> AbstractContextManager[RankGroup]:
        """The ranks of one launch; closed when it ends. Raises ConfigError if it cannot run."""

    def train(
        self,
        spec: TrainSpec,
        *,
        num_ranks: int,
        on_line: OnLine,
        max_restarts: int | None = None,
        min_ranks: int | None = None,
    ) -> None:
        """Run to the end. Raises the TxlError that ended it; PreemptedError after a stop signal.

        After a failure that a restart can repair, all ranks start again from the newest checkpoint,
        `max_restarts` times without a new checkpoint in between (None: the launcher's default).
        With a lower `min_ranks` the run is elastic: it continues with fewer ranks when some are
        lost.
        """
        from txl_dist.launch.supervise import supervise

        ranks = RankRange(min_ranks or num_ranks, num_ranks)
        supervise(self.rank_group, spec, ranks=ranks, max_restarts=max_restarts, on_line=on_line)

    def workers(
        self, num_workers: int, *, use_gpus: bool = False
    ) -> "AbstractContextManager[Workers]":
        """Workers for evaluation and preparation; `use_gpus`: with a GPU each, if there are any."""
        raise ConfigError(
            f"{type(self).__name__} only trains. Use --on processes, --on ray or the address of a "
            "Ray cluster"
        )

    def check_nodes(self, request: "DoctorRequest") -> "list[Finding]":
        """Return what `txl doctor` finds on every machine on which this launcher starts ranks."""
        raise ConfigError(
            f"{type(self).__name__} cannot check its nodes. Run txl doctor on each, without --on"
        )


def find_launcher(on: str) -> Launcher:
    """The launcher of `--on`.

    `on` is the name of a launcher, its name with an argument (NAME:REST), or the address of a
    running Ray cluster (HOST:PORT, ray://HOST:PORT or auto).
    """
    launchers = {entry.name: entry for entry in entry_points(group=GROUP)}
    launchers |= {name: EntryPoint(name, value, GROUP) for name, value in OURS.items()}
    name, colon, argument = on.partition(":")
    arguments = (argument,) if colon else ()
    if name not in launchers or (colon and name == OF_ADDRESSES):  # ray:6379 is a host
        if not (on == "auto" or "://" in on or (colon and on.rpartition(":")[2].isdecimal())):
            raise ConfigError(
                f"--on {on} is neither the address of a Ray cluster (host:port, ray://host:port or "
                f"auto) nor an installed launcher ({', '.join(sorted(launchers))})"
            )
        name, arguments = OF_ADDRESSES, (on,)
    launcher: Launcher = launchers[name].load()(*arguments)
    return launcher
