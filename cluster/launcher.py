"""RayLauncher: the launcher for `txl ... --on ray` and `--on ADDRESS`."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from txl_dist.launch.launcher import Launcher, RankGroup, RankRange
from txl_dist.training.job import TrainJob

if TYPE_CHECKING:
    from data_pipeline.system.workers import Workers
    from txl_dist.doctor.checks import DoctorRequest
    from txl_dist.doctor.finding import Finding


class RayLauncher(Launcher):
    """Trains, evaluates and prepares with actors.

    `address` is that of a running cluster; None starts a private Ray on this machine.
    """

    # The imports are inside the methods because Ray takes seconds to import, and each command needs
    # one of the modules.

    def __init__(self, address: str | None = None) -> None:
        self._address = address

    def rank_group(self, job: TrainJob, ranks: RankRange) -> AbstractContextManager[RankGroup]:
        """The ranks as actors in a placement group."""
        from cluster.rank_group import RayRankGroup

        return RayRankGroup(job, ranks, address=self._address)

    def workers(
        self, num_workers: int, *, use_gpus: bool = False
    ) -> "AbstractContextManager[Workers]":
        """Ray actors; on a cluster, all nodes must see the same files as this process."""
        from cluster.workers import RayWorkers

        return RayWorkers(num_workers, address=self._address, use_gpus=use_gpus)

    def check_nodes(self, request: "DoctorRequest") -> "list[Finding]":
        """Check every node of the cluster, and the links between them."""
        from cluster.doctor import check_cluster_nodes

        return check_cluster_nodes(request, address=self._address)
