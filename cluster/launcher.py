"""RayLauncher: what `txl ... --on ray` and `--on ADDRESS` are, found by entry point."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from data_pipeline.processes.workers import Workers
from txl_dist.evaluation.evaluate import EvaluationJob, EvaluationResult
from txl_dist.launch.launcher import OnLine
from txl_dist.training.job import TrainJob


class RayLauncher:
    """Ray Train trains, actors evaluate, tasks prepare. `address` None: a Ray of our own."""

    def __init__(self, address: str | None = None) -> None:
        self._address = address

    def train(self, job: TrainJob, *, num_ranks: int, on_line: OnLine) -> None:
        """Raises the TxlError that ended the run; PreemptedError after SIGTERM or SIGINT."""
        from cluster.training import train_on_ray

        train_on_ray(job, num_ranks=num_ranks, address=self._address, on_line=on_line)

    def evaluate(
        self, job: EvaluationJob, *, num_workers: int, on_progress: Callable[[int, int], None]
    ) -> EvaluationResult:
        """The same number as one sequential pass, for any number of workers."""
        from cluster.evaluation import evaluate_on_ray

        return evaluate_on_ray(
            job, num_workers=num_workers, address=self._address, on_progress=on_progress
        )

    def workers(self, num_workers: int) -> AbstractContextManager[Workers]:
        """Ray tasks that see the same files as this process."""
        from cluster.preparation import RayWorkers

        return RayWorkers(num_workers, address=self._address)
