"""The first stage of a start: config, data and ranks, checked before anything is built."""

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Self

from txl_dist.config.run_config import RunConfig
from txl_dist.runtime.world import World
from txl_dist.training.data import TrainingData
from txl_dist.training.duration import resolve_duration
from txl_dist.training.job import TrainJob, require_same_job
from txl_dist.training.run_directory import RunDirectory
from txl_dist.training.scoring_worker import OpenWorkers, scoring_process

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank of one job: the inputs of the functions that build the parts of a run."""

    job: TrainJob
    """With the length of the run in steps."""
    world: World
    directory: RunDirectory
    stack: ExitStack
    """Closes files, locks and threads."""
    data: TrainingData
    config: RunConfig
    """The settings of the job at the step where it continues."""
    written_config: RunConfig
    """The config of the job before `resolve_duration`."""
    run_id: str = ""
    """Id of the run, chosen by rank 0; stored in every checkpoint."""
    open_workers: OpenWorkers = scoring_process
    """Opens the worker of `evaluation.on: workers`."""

    def after_step(self, step: int, *, run_id: str) -> Self:
        """The context of a run that continues after `step`, with the settings that hold there."""
        config = self.job.config.after_step(step)
        return replace(self, config=config, data=self.data.with_settings(config), run_id=run_id)


def open_inputs(
    job: TrainJob,
    world: World,
    directory: RunDirectory,
    stack: ExitStack,
    *,
    open_workers: OpenWorkers = scoring_process,
) -> RankContext:
    """Open the data and join the ranks. Collective.

    Raises DataError or ConfigError for data or settings that cannot be used, and ConfigError if the
    ranks have different ones.
    """
    # Before the rendezvous: wrong data or config must not cost one.
    data, written_config = TrainingData.open(job.config, num_ranks=world.num_ranks), job.config
    job = job.model_copy(update={"config": resolve_duration(job.config, data.plan)})
    world.join(timeout_seconds=job.config.training.rank_timeout_seconds)
    log.info("%d of %d ranks are up", world.num_ranks, world.num_ranks)
    require_same_job(job.config, data, world)
    return RankContext(
        job, world, directory, stack, data, job.config, written_config, open_workers=open_workers
    )
