"""Launchers: start the processes of a run, and wait for them.

A launcher is an entry point of group `txl.launchers`. `processes` is part of this package; `ray` is
in `cluster`, which this package must not import. Under torchrun no launcher is used.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol

from txl_dist.errors import ConfigError

if TYPE_CHECKING:
    from data_pipeline.system.workers import Workers
    from txl_dist.doctor.checks import DoctorRequest
    from txl_dist.doctor.finding import Finding
    from txl_dist.training.job import TrainJob

OnLine = Callable[[str], None]
"""Called with every line that rank 0 logs, soon after it is written."""


class Launcher(Protocol):
    """Starts ranks or workers, and raises the TxlError that ended them."""

    def train(
        self,
        job: "TrainJob",
        *,
        num_ranks: int,
        on_line: OnLine,
        max_restarts: int | None = None,
        min_ranks: int | None = None,
    ) -> None:
        """Run the job to its end. Raises PreemptedError after a stop signal.

        `min_ranks`: if it is lower than `num_ranks`, the run is elastic: it continues with fewer
        ranks when some are lost. Raises ConfigError if the launcher cannot do that.
        `max_restarts`: restarts after failures of ranks, without a new checkpoint between them;
        None is the launcher's default.
        """

    def workers(
        self, num_workers: int, *, use_gpus: bool = False
    ) -> "AbstractContextManager[Workers]":
        """Workers for evaluation or preparation; `use_gpus`: with a GPU each, if there are any."""

    def check_nodes(self, request: "DoctorRequest") -> "list[Finding]":
        """Check every machine on which this launcher can start ranks (`txl doctor`)."""


def find_launcher(on: str) -> Launcher:
    """The launcher for `--on`: its name, or the address of a running Ray cluster."""
    launchers = {entry.name: entry for entry in entry_points(group="txl.launchers")}
    is_address = on == "auto" or ":" in on
    name, options = ("ray", {"address": on}) if is_address else (on, {})
    if name not in launchers:
        names = ", ".join(sorted(launchers)) or "none: make setup"
        raise ConfigError(
            f"--on {on} is neither the address of a Ray cluster (host:port, ray://host:port or "
            f"auto) nor an installed launcher ({names})"
        )
    launcher: Launcher = launchers[name].load()(**options)
    return launcher
