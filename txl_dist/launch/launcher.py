"""What a launcher is: it starts the ranks of a run, says how they ended, and kills them.

    find_launcher(on) -> Launcher.train -> supervise.py, which decides everything
                         Launcher.rank_group -> RankGroup: start, poll, request_stop, kill
                                                poll -> events (RanksUp, RankEnded, NodeLost, ...)

A launcher is an entry point of group `txl.launchers`, selected by `txl train --on NAME`.
`processes` and `ray` are part of this project; `ray` is in `cluster`, which this package must not
import. Under torchrun no launcher is used. To add one: docs/how_to/add_a_launcher.md.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from txl_dist.errors import ConfigError
from txl_dist.launch.rank_group import OnLine, RankGroup, RankRange
from txl_dist.launch.supervise import supervise
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


class Launcher(ABC):
    """Built with what follows a colon in `--on NAME:REST`, if anything does."""

    @abstractmethod
    def rank_group(self, spec: TrainSpec, ranks: RankRange) -> AbstractContextManager[RankGroup]:
        """The ranks of one launch; closed when it ends. Raises ConfigError if it cannot run."""

    def check_ranks(self, ranks: RankRange) -> None:  # noqa: B027 - most can start any
        """Raise ConfigError for ranks that it can never start. Starts nothing."""

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
    elif colon and name in OURS:
        raise ConfigError(f"--on {on}: {name} takes nothing after a colon. Give --on {name}")
    launcher: Launcher = launchers[name].load()(*arguments)
    return launcher
