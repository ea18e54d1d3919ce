"""RayLauncher: the launcher for `txl ... --on ray` and `--on ADDRESS` (entry point `ray`)."""

from contextlib import AbstractContextManager

from data_pipeline.system.workers import Workers
from txl_dist.doctor.checks import DoctorRequest
from txl_dist.doctor.finding import Finding
from txl_dist.launch.launcher import OnLine
from txl_dist.launch.rank_range import RankRange
from txl_dist.training.job import TrainJob


class RayLauncher:
    """Trains with Ray Train, evaluates and prepares with actors.

    `address` is that of a running cluster; None starts a private Ray on this machine.
    """

    # The imports are inside the methods because Ray takes seconds to import, and each command needs
    # one of the modules.

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

    def workers(
        self, num_workers: int, *, use_gpus: bool = False
    ) -> AbstractContextManager[Workers]:
        """Ray actors; on a cluster, all nodes must see the same files as this process."""
        from cluster.workers import RayWorkers

        return RayWorkers(num_workers, address=self._address, use_gpus=use_gpus)

    def check_nodes(self, request: DoctorRequest) -> list[Finding]:
        """Check every node of the cluster, and the links between them."""
        from cluster.doctor import check_cluster_nodes

        return check_cluster_nodes(request, address=self._address)
