"""Launchers: who starts the processes of a run and waits for them.

Found by entry point, group `txl.launchers`: plain processes are this package's own, and `cluster`
brings Ray without being imported here. Under torchrun no launcher of ours is needed.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol

from txl_dist.errors import ConfigError

if TYPE_CHECKING:
    from data_pipeline.processes.workers import Workers
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
        """Score a split with `num_workers`; `on_progress(chunks done, chunks)`."""

    def workers(self, num_workers: int) -> AbstractContextManager["Workers"]:
        """Workers that prepare or verify a dataset."""


def find_launcher(on: str) -> Launcher:
    """The launcher for `--on`: the name of one, or the address of a running Ray cluster."""
    found = {entry.name: entry for entry in entry_points(group="txl.launchers")}
    is_address = on == "auto" or ":" in on
    name, address = ("ray", on) if is_address else (on, None)
    if name not in found:
        raise ConfigError(
            f"--on {on} is neither the address of a Ray cluster (host:port, ray://host:port or "
            f"auto) nor an installed launcher ({', '.join(sorted(found)) or 'none: make setup'})"
        )
    options = {} if address is None else {"address": address}
    launcher: Launcher = found[name].load()(**options)
    return launcher
