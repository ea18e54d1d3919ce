"""The first stages of a start, before anything is built.

open_inputs  inputs   config, data and the other ranks, checked
begin_run    attempt  the lock, and the attempt that ends older ones
             point    the checkpoint to resume from, and the evaluations that are missing there
"""

import logging
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Self

from txl_dist.checkpoint.writer import CheckpointHeader
from txl_dist.config.config_file import flatten_config
from txl_dist.config.run_config import RunConfig
from txl_dist.runtime.process import code_description
from txl_dist.runtime.stop import StopRequest
from txl_dist.runtime.world import World
from txl_dist.training.data import TrainingData
from txl_dist.training.job import TrainJob, require_same_job
from txl_dist.training.resume import find_resume_point
from txl_dist.training.resume_point import ResumePoint, run_id_of
from txl_dist.training.run_directory import RunDirectory, begin_attempt
from txl_dist.training.schedule import resolve_duration
from txl_dist.training.scores import ScoreTable, due_in

LOCK_TIMEOUT_SECONDS = 30.0
"""After a failure Ray may start a new rank 0 shortly before the old one has released the lock."""

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
    job: TrainJob, world: World, directory: RunDirectory, stack: ExitStack
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
    return RankContext(job, world, directory, stack, data, job.config, written_config)


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


def begin_run(inputs: RankContext, stop: StopRequest, run_stack: ExitStack) -> Beginning:
    """Take the lock, find the checkpoint to resume from, and begin an attempt. Collective."""
    job, world, directory, data = inputs.job, inputs.world, inputs.directory, inputs.data
    lock = directory.locked(timeout_seconds=LOCK_TIMEOUT_SECONDS, force=job.force_unlock)
    world.run_on_rank_zero(lambda: inputs.stack.enter_context(lock))
    checkpoints = directory.checkpoints
    # After a change of settings (`training.changes`) the attempt goes on. Its newest checkpoint is
    # in the run directory, so the run continues even if its URL cannot be reached.
    is_new_attempt = checkpoints.attempt is None
    point = find_resume_point(job, data, world, download=is_new_attempt)
    run_id, newest_step = world.broadcast(run_id_of(point)), checkpoints.newest_step()
    if not is_new_attempt:
        return _beginning(inputs, point, run_id, is_new_attempt=False)
    # Only after all checks: beginning an attempt fences the one that is running.
    checkpoints.attempt = begin_attempt(job, directory, world, run_id=run_id)
    if world.broadcast(checkpoints.newest_step() != newest_step):
        # The older attempt has saved meanwhile.
        point = find_resume_point(job, data, world, download=False)
        run_id = world.broadcast(run_id_of(point))
    _share_stop(stop, directory, world, run_stack)
    return _beginning(inputs, point, run_id, is_new_attempt=True)


def _beginning(
    inputs: RankContext, point: ResumePoint | None, run_id: str, *, is_new_attempt: bool
) -> Beginning:
    """Where to begin, and which evaluations are missing there. Collective."""
    world, config, checkpoints = inputs.world, inputs.job.config, inputs.directory.checkpoints
    on_ranks, scores, unscored = config.evaluation.on == "ranks", None, list[int]()
    if world.is_rank_zero:
        is_due = due_in(config) if inputs.data.evaluation else lambda step: False
        inherited = point.state.best if point is not None and not point.is_fork else None
        scores = ScoreTable(checkpoints, is_due, inherited=inherited)
        kept_step = point.kept_step if point else 0
        scores.rewind(kept_step)
        unscored = [step for step in scores.waiting() if step <= kept_step]
        if on_ranks:
            # The ranks can score only the weights with which they begin, `txl eval --watch` others.
            unscored = [step for step in unscored if step == kept_step]
    unscored = world.broadcast(unscored)
    return Beginning(point, run_id, is_new_attempt, scores, unscored, on_ranks)


def _share_stop(stop: StopRequest, directory: RunDirectory, world: World, stack: ExitStack) -> None:
    """A launcher has given the ranks a file; torchrun, which has started them, does not."""
    if stop.has_file:
        return
    world.run_on_rank_zero(directory.remove_stop_files)
    stop.share_by(directory.stop_file)
    if world.is_rank_zero:
        stack.callback(directory.stop_file.unlink, missing_ok=True)
