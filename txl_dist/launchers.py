"""Launchers: who starts the processes of a run and waits for them.

`txl_dist` knows two ways by itself, plain processes and being a rank under torchrun. Others are
found by entry point, group `txl.launchers`; so `cluster` brings Ray without being imported here.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol

from txl_dist.errors import ConfigError

if TYPE_CHECKING:
    from txl_dist.evaluation.evaluate import EvaluationJob, EvaluationResult
    from txl_dist.training.job import TrainJob

OnLine = Callable[[str], None]
"""Receives every line rank 0 logs, as it comes."""


class Launcher(Protocol):
    """Starts ranks or workers somewhere; raises the TxlError that ended them."""

    def train(self, job: "TrainJob", *, num_ranks: int, on_line: OnLine) -> None:
        """Run the job to its end. Raises PreemptedError when asked to stop by a signal."""

    def evaluate(
        self, job: "EvaluationJob", *, num_workers: int, on_progress: Callable[[int, int], None]
    ) -> "EvaluationResult":
        """Score a split with `num_workers`; `on_progress(pieces done, pieces)`."""


def find_launcher(on: str) -> Launcher:
    """The launcher for `--on`: `processes`, `ray`, or the address of a running Ray cluster."""
    if on == "processes":
        from txl_dist.processes import ProcessLauncher

        return ProcessLauncher()
    found = {entry.name: entry for entry in entry_points(group="txl.launchers")}
    if "ray" not in found:
        raise ConfigError(
            f"--on {on} needs the package `cluster`, which is not installed. Install this project "
            "with `make setup`, or train without Ray: --on processes"
        )
    launcher: Launcher = found["ray"].load()(address=None if on == "ray" else on)
    return launcher
