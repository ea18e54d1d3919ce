"""What the functions that build the parts of a run are given: RankContext, and Beginning."""

import logging
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from data_pipeline.errors import counted
from txl_dist.checkpoint.writer import CheckpointHeader
from txl_dist.config.config_file import flatten_config
from txl_dist.config.run_config import RunConfig
from txl_dist.runtime.process import code_description
from txl_dist.runtime.stop import StopRequest
from txl_dist.runtime.world import World
from txl_dist.training.data import TrainingData
from txl_dist.training.job import TrainJob, require_same_job
from txl_dist.training.resume import ResumePoint
from txl_dist.training.run_directory import RunDirectory
from txl_dist.training.schedule import resolve_duration
from txl_dist.training.scores import ScoreTable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank of one job: the inputs of the functions that build the parts of a run."""

    job: TrainJob
    """As it was given: RUN/config.yaml keeps its config."""
    world: World
    directory: RunDirectory
    stack: ExitStack
    """Closes files, locks, threads and processes."""
    stop: StopRequest
    data: TrainingData
    config: RunConfig
    """That of the job, with the length of the run in steps."""
    run_id: str = ""
    """Id of the run, chosen by rank 0; stored in every checkpoint."""

    @property
    def checkpoint_header(self) -> CheckpointHeader:
        """What all checkpoints of this attempt have in common."""
        attempt = self.directory.checkpoints.attempt
        return CheckpointHeader(
            written_by=code_description(),
            model=asdict(self.data.model_config),
            run=flatten_config(self.config),
            run_id=self.run_id,
            attempt=attempt.record.number if attempt else 0,
            tokenizer_json=self.data.tokenizer.to_json(),
            tokenizer_digest=self.data.tokenizer.digest,
            data_digest=self.data.digest,
            vocab_size=self.data.vocabulary.vocab_size,
            zero_stage=self.config.deepspeed.zero_stage,
            num_lanes=self.config.data.num_lanes,
        )


def open_inputs(
    job: TrainJob,
    world: World,
    directory: RunDirectory,
    stack: ExitStack,
    *,
    stop: StopRequest | None = None,
) -> RankContext:
    """Open the data and join the ranks. Collective.

    Raises DataError or ConfigError for data or settings that cannot be used, and ConfigError if the
    ranks have different ones.
    """
    # Before the rendezvous: wrong data or config must not cost one.
    data = TrainingData.open(job.config, num_ranks=world.num_ranks)
    config = resolve_duration(job.config, data.plan)
    world.join(timeout_seconds=config.training.rank_timeout_seconds)
    log.info("all ranks are up: %s", counted(world.num_ranks, "rank"))
    require_same_job(config, data, world)
    stop = StopRequest() if stop is None else stop
    return RankContext(job, world, directory, stack, stop, data, config)


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a start begins."""

    point: ResumePoint | None
    """None: a new run."""
    run_id: str
    scores: ScoreTable | None
    """On rank 0."""
    evaluation_is_pending: bool
    """Whether the run begins with the evaluation of the point."""

    @property
    def kept_step(self) -> int:
        """The last step in the run directory that belongs to this trajectory."""
        return self.point.kept_step if self.point else 0
