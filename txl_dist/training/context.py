"""What the functions that build the parts of a run are given: RankContext, and Beginning."""

import logging
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Self

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
    """With the length of the run in steps."""
    world: World
    directory: RunDirectory
    stack: ExitStack
    """Closes files, locks and threads."""
    run_stack: ExitStack
    """Closes what stays open over changes of settings."""
    stop: StopRequest
    data: TrainingData
    config: RunConfig
    """The settings of the job at the step where it continues."""
    written_config: RunConfig
    """The config of the job before `resolve_duration`."""
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
    run_stack: ExitStack | None = None,
    stop: StopRequest | None = None,
) -> RankContext:
    """Open the data and join the ranks. Collective.

    Raises DataError or ConfigError for data or settings that cannot be used, and ConfigError if the
    ranks have different ones. `run_stack` is `stack` for a run without changes of settings.
    """
    # Before the rendezvous: wrong data or config must not cost one.
    data, written_config = TrainingData.open(job.config, num_ranks=world.num_ranks), job.config
    job = job.model_copy(update={"config": resolve_duration(job.config, data.plan)})
    world.join(timeout_seconds=job.config.training.rank_timeout_seconds)
    log.info("all ranks are up: %s", counted(world.num_ranks, "rank"))
    require_same_job(job.config, data, world)
    return RankContext(
        job,
        world,
        directory,
        stack,
        run_stack or stack,
        StopRequest() if stop is None else stop,
        data,
        job.config,
        written_config,
    )


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a start begins."""

    point: ResumePoint | None
    """None: a new run."""
    run_id: str
    is_new_attempt: bool
    """False after a change of settings, for which the attempt goes on."""
    scores: ScoreTable | None
    """On rank 0."""
    unscored: list[int]
    """Steps up to the point whose evaluation this run has to do, ascending."""
    on_ranks: bool
    """Whether the ranks evaluate. Then only the step of the point can be unscored."""

    @property
    def evaluation_is_pending(self) -> bool:
        """Whether the ranks begin with an evaluation."""
        return self.on_ranks and bool(self.unscored)

    @property
    def settings_step(self) -> int:
        """The run continues with the settings after this step."""
        # A pending evaluation belongs to the last step, so it precedes a change after that step.
        return self.point.state.step - self.evaluation_is_pending if self.point else 0

    @property
    def kept_step(self) -> int:
        """The last step in the run directory that belongs to this trajectory."""
        return self.point.kept_step if self.point else 0
