"""RayLauncher: the launcher for `txl ... --on ray` and `--on ADDRESS` (entry point `ray`)."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from data_pipeline.processes.workers import Workers
from txl_dist.evaluation.evaluate import EvaluationJob, EvaluationResult
from txl_dist.launch.launcher import OnLine
from txl_dist.launch.rank_range import RankRange
from txl_dist.training.job import TrainJob


class RayLauncher:
    """Trains with Ray Train, evaluates with actors, prepares with tasks.

    `address` is that of a running cluster; None starts a private Ray on this machine.
    """

    # The imports are inside the methods because Ray takes seconds to import, and each command needs
    # one of the three modules.

    def __init__(self, address: str | None = None) -> None:
        self._address = address

    def train(
        self,
        job: TrainJob,
        *,
        num_ranks: int,
        on_line: OnLine,
        max_restarts: int | None = None,
        min_ranks: int | None = None,
    ) -> None:
        """Raises the TxlError that ended the run; PreemptedError after a stop signal.

        `max_restarts` None: `ray.max_restarts` of the config.
        """
        from cluster.ray_train import train_on_ray

        train_on_ray(
            job,
            ranks=RankRange(min_ranks or num_ranks, num_ranks),
            address=self._address,
            on_line=on_line,
            max_restarts=max_restarts,
        )

    def evaluate(
        self, job: EvaluationJob, *, num_workers: int, on_progress: Callable[[int, int], None]
    ) -> EvaluationResult:
        """The result of one sequential pass, for any number of workers."""
        from cluster.evaluation import evaluate_on_ray

        return evaluate_on_ray(
            job, num_workers=num_workers, address=self._address, on_progress=on_progress
        )

    def workers(self, num_workers: int) -> AbstractContextManager[Workers]:
        """Ray tasks; on a cluster, all nodes must see the same files as this process."""
        from cluster.preparation import RayWorkers

        return RayWorkers(num_workers, address=self._address)
