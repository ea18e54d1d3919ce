"""Launchers: what starts the ranks of a run, as `txl train --on NAME` selects it.

    find_launcher(on) -> Launcher.train -> supervise.py, which decides everything
                         Launcher.rank_group -> RankGroup (group.py)

A launcher is an entry point of group `txl.launchers`. `processes` and `ray` are part of this
project; `ray` is in `cluster`, which this package must not import. Under torchrun no launcher is
used. To add one: docs/how_to/add_a_launcher.md.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from txl_dist.errors import ConfigError
from txl_dist.launch.group import OnLine, RankGroup, RankRange

if TYPE_CHECKING:
    from data_pipeline.system.workers import Workers
    from txl_dist.training.spec import TrainSpec

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
    def rank_group(self, spec: "TrainSpec", ranks: RankRange) -> AbstractContextManager[RankGroup]:
        """The ranks of one launch; closed when it ends. Raises ConfigError if it cannot run."""

    def train(
        self,
        spec: "TrainSpec",
        *,
        num_ranks: int,
        on_line: OnLine,
        max_restarts: int | None = None,
        min_ranks: int | None = None,
    ) -> None:
        """Run to the end. Raises the TxlError that ended it; PreemptedError after a stop
        signal.

        `min_ranks`: if it is lower than `num_ranks`, the run is elastic: it continues with fewer
        ranks when some are lost. `max_restarts`: restarts after failures of ranks, without a new
        checkpoint between them; None is the launcher's default.
        """
        from txl_dist.launch.supervise import supervise

        ranks = RankRange(min_ranks or num_ranks, num_ranks)
        supervise(self.rank_group, spec, ranks=ranks, max_restarts=max_restarts, on_line=on_line)


@runtime_checkable
class WorkerLauncher(Protocol):
    """A launcher that can also start workers for evaluation and preparation."""

    def workers(
        self, num_workers: int, *, use_gpus: bool = False
    ) -> "AbstractContextManager[Workers]":
        """`use_gpus`: with a GPU each, if there are any."""


def find_launcher(on: str) -> Launcher:
    """The launcher of `--on`. It may also be a WorkerLauncher, or check its nodes (`txl doctor`).

    `on` is the name of a launcher, its name with an argument (NAME:REST), or the address of a
    running Ray cluster (HOST:PORT, ray://HOST:PORT or auto).
    """
    launchers = {entry.name: entry for entry in entry_points(group=GROUP)}
    launchers |= {name: EntryPoint(name, value, GROUP) for name, value in OURS.items()}
    name, colon, argument = on.partition(":")
    arguments: tuple[str, ...] = ()
    if on in launchers:
        name = on
    elif colon and name in launchers and name != OF_ADDRESSES:  # ray:6379 is a host
        arguments = (argument,)
    elif on == "auto" or "://" in on or (colon and on.rpartition(":")[2].isdecimal()):
        name, arguments = OF_ADDRESSES, (on,)
    else:
        raise ConfigError(
            f"--on {on} is neither the address of a Ray cluster (host:port, ray://host:port or "
            f"auto) nor an installed launcher ({', '.join(sorted(launchers))})"
        )
    launcher: Launcher = launchers[name].load()(*arguments)
    return launcher
