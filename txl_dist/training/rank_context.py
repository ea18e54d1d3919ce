"""RankContext: what all parts of a run are built from."""

from contextlib import ExitStack
from dataclasses import dataclass

from txl_dist.config.run_config import RunConfig
from txl_dist.runtime.world import World
from txl_dist.training.data import TrainingData
from txl_dist.training.job import TrainJob
from txl_dist.training.run_directory import RunDirectory
from txl_dist.training.scoring_worker import OpenWorkers, scoring_process


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank of one job: the inputs of the functions that build the parts of a run."""

    job: TrainJob
    world: World
    directory: RunDirectory
    stack: ExitStack
    data: TrainingData
    config: RunConfig
    """The settings of the job at the step where it continues."""
    written_config: RunConfig
    """The config of the job before `resolve_duration`."""
    run_id: str
    """Id of the run, chosen by rank 0; stored in every checkpoint."""
    open_workers: OpenWorkers = scoring_process
    """Opens the worker of `evaluation.on: workers`."""
