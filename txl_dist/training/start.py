"""The start of a rank: from the job to everything that the parts of its run are built from.

    data and config   opened and checked, before the ranks wait for each other
    other ranks       joined, and the same job on all of them
    lock              of the run directory, so that one process on a host writes it
    resume point      the checkpoint to resume from, or none (`resume.py`)
    attempt           ends older attempts of the run
    scores            of the run until now, and whether that of the resume point is missing

`build.py` builds the run from a Start.
"""

import logging
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from data_pipeline.errors import counted
from data_pipeline.system.files import remove_leftovers, write_file
from txl_dist.checkpoint.writer import CheckpointHeader
from txl_dist.config.config_file import dump_run_config, flatten_config
from txl_dist.config.run_config import RunConfig
from txl_dist.runtime.process import code_description
from txl_dist.runtime.stop import StopRequest
from txl_dist.runtime.world import World
from txl_dist.tracking.journal import MetricsJournal, last_trained_step
from txl_dist.training.data import TrainingData
from txl_dist.training.job import TrainJob, require_same_job
from txl_dist.training.resume import ResumePoint, find_resume_point, run_id_of
from txl_dist.training.run_directory import RunDirectory, begin_attempt
from txl_dist.training.schedule import resolve_duration
from txl_dist.training.scores import ScoreTable, due_in

LOCK_TIMEOUT_SECONDS = 30.0
"""After a failure Ray may start a new rank 0 shortly before the old one has released the lock."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One rank at the start of a run: the input of the functions that build its parts."""

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
    point: ResumePoint | None
    """None: a new run."""
    run_id: str
    """Id of the run, chosen by rank 0; stored in every checkpoint."""
    scores: ScoreTable | None
    """On rank 0."""
    evaluation_is_pending: bool
    """Whether the run begins with the evaluation of the resume point."""

    @classmethod
    def open(
        cls,
        job: TrainJob,
        world: World,
        directory: RunDirectory,
        stack: ExitStack,
        *,
        stop: StopRequest | None = None,
    ) -> "Start":
        """Open the data, join the ranks and begin an attempt. Collective.

        Raises DataError or ConfigError for data or settings that cannot be used, ConfigError if the
        ranks have different ones, and the errors of `find_resume_point` and `begin_attempt`.
        """
        # Before the rendezvous: wrong data or config must not cost one.
        data = TrainingData.open(job.config, num_ranks=world.num_ranks)
        config = resolve_duration(job.config, data.plan)
        world.join(timeout_seconds=config.training.rank_timeout_seconds)
        log.info("all ranks are up: %s", counted(world.num_ranks, "rank"))
        require_same_job(config, data, world)

        resolved, checkpoints = job.model_copy(update={"config": config}), directory.checkpoints
        lock = directory.locked(timeout_seconds=LOCK_TIMEOUT_SECONDS, force=job.force_unlock)
        world.run_on_rank_zero(lambda: stack.enter_context(lock))
        point = find_resume_point(resolved, data, world)
        run_id, newest_step = world.broadcast(run_id_of(point)), checkpoints.newest_step()
        # Only after all checks: beginning an attempt fences the one that is running.
        checkpoints.attempt = begin_attempt(resolved, directory, world, run_id=run_id)
        if world.broadcast(checkpoints.newest_step() != newest_step):
            # The older attempt has saved meanwhile.
            point = find_resume_point(resolved, data, world, download=False)
            run_id = world.broadcast(run_id_of(point))

        stop = StopRequest() if stop is None else stop
        if not stop.has_file:  # torchrun has started the ranks; a launcher would give them one
            world.run_on_rank_zero(directory.remove_stop_files)
            stop.share_by(directory.stop_file)
            if world.is_rank_zero:
                stack.callback(directory.stop_file.unlink, missing_ok=True)

        scores, is_pending = None, False
        if world.is_rank_zero:
            is_due = due_in(config) if data.evaluation else lambda step: False
            inherited = point.state.best if point is not None and not point.is_fork else None
            scores = ScoreTable(checkpoints, is_due, inherited=inherited)
            kept_step = point.kept_step if point else 0
            scores.rewind(kept_step)
            is_pending = kept_step in scores.waiting()
        return cls(
            job=job, world=world, directory=directory, stack=stack, stop=stop, data=data,
            config=config, point=point, run_id=run_id, scores=scores,
            evaluation_is_pending=world.broadcast(is_pending),
        )  # fmt: skip

    @property
    def kept_step(self) -> int:
        """The last step in the run directory that belongs to this trajectory."""
        return self.point.kept_step if self.point else 0

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

    def clean_directory(self) -> int:
        """Make the run directory consistent: no checkpoints, scores or metrics after the start.

        Called on rank 0. Returns the last step of the metrics before that.
        """
        directory, evaluation, scores = self.directory, self.data.evaluation, self.scores
        assert scores is not None
        reached_step = last_trained_step(directory.metrics)
        # Everything here is idempotent: a process killed at any line leaves a directory that the
        # next start makes consistent again.
        directory.checkpoints.open()
        for step in directory.checkpoints.rewind(self.kept_step, best_step=scores.best_step):
            log.warning("the checkpoint at step %d is renamed to superseded-*", step)
        for path in (directory.config, directory.metrics):
            remove_leftovers(path)
        write_file(directory.config, dump_run_config(self.job.config).encode())
        redone = {}
        if evaluation and self.evaluation_is_pending:
            redone = {self.kept_step: f"{evaluation.label}/loss"}
        with MetricsJournal(directory.metrics) as journal:
            # A copy of the run from a URL has metrics, but no files of scores.
            journal.truncate_after(self.kept_step, redone=redone)
        if evaluation:
            scores.write_metrics(directory.metrics, evaluation.label)
        return reached_step
