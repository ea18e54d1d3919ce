"""Builds the Trainer of one rank, in five stages. Every launcher uses these two functions.

    open_inputs    inputs   config, data and the other ranks, checked (context.py)
    build_trainer  attempt  the lock, and the attempt that ends older ones
                   point    the checkpoint to resume from, and whether its evaluation is missing
                   parts    what computes, saves and observes, and the state to begin with
                   trainer  the loop over these, and the segments that it reads

Some stages are collective, so every rank has to go through all of them in this order.
"""

from dataclasses import replace

from txl_dist.training.computation import build_evaluator, build_step
from txl_dist.training.context import Beginning, RankContext
from txl_dist.training.loop import Trainer
from txl_dist.training.observers import build_observers
from txl_dist.training.recovery import Recovery
from txl_dist.training.report import log_start
from txl_dist.training.resume import ResumePoint, find_resume_point, run_id_of
from txl_dist.training.run_directory import begin_attempt
from txl_dist.training.saving import open_saver
from txl_dist.training.scores import ScoreTable, due_in
from txl_dist.training.segment_source import SegmentSource
from txl_dist.training.start_state import initial_state, open_run, resume_at
from txl_dist.training.tracked import start_tracker

LOCK_TIMEOUT_SECONDS = 30.0
"""After a failure Ray may start a new rank 0 shortly before the old one has released the lock."""


def build_trainer(inputs: RankContext) -> Trainer:
    """Resume or initialise, and build all parts of the run. Collective."""
    world = inputs.world
    beginning = begin_run(inputs)
    rank = replace(inputs, run_id=beginning.run_id)
    step, point = build_step(rank), beginning.point
    state = resume_at(point, rank, step) if point else initial_state(rank, None)
    # Before the observers, which continue its files.
    reached_steps = world.run_on_all(lambda: open_run(rank, beginning) if beginning.scores else 0)
    # Before the tracker: the peak is measured without its process.
    observers = build_observers(rank, state)
    tracker = start_tracker(rank)
    if world.is_rank_zero:
        log_start(rank, beginning, state, shapes=step.engine.shapes, reached_step=reached_steps[0])
    saver = open_saver(rank, beginning, step, tracker)
    recovery = Recovery(rank, step, observers, saver)
    source = SegmentSource(rank, step)
    return Trainer(
        config=rank.config,
        state=state,
        source=source,
        segments=source.open_at(state),
        step=step,
        recovery=recovery,
        observers=observers,
        saver=saver,
        stop=rank.stop,
        evaluate=build_evaluator(rank, step.engine),
        scores=beginning.scores,
        evaluation_is_pending=beginning.evaluation_is_pending,
    )


def begin_run(inputs: RankContext) -> Beginning:
    """Take the lock, find the checkpoint to resume from, and begin an attempt. Collective."""
    world, directory, data = inputs.world, inputs.directory, inputs.data
    job = inputs.job.model_copy(update={"config": inputs.config})
    lock = directory.locked(timeout_seconds=LOCK_TIMEOUT_SECONDS, force=job.force_unlock)
    world.run_on_rank_zero(lambda: inputs.stack.enter_context(lock))
    checkpoints = directory.checkpoints
    point = find_resume_point(job, data, world)
    run_id, newest_step = world.broadcast(run_id_of(point)), checkpoints.newest_step()
    # Only after all checks: beginning an attempt fences the one that is running.
    checkpoints.attempt = begin_attempt(job, directory, world, run_id=run_id)
    if world.broadcast(checkpoints.newest_step() != newest_step):
        # The older attempt has saved meanwhile.
        point = find_resume_point(job, data, world, download=False)
        run_id = world.broadcast(run_id_of(point))
    _share_stop(inputs)
    scores, is_pending = _open_scores(inputs, point)
    return Beginning(point, run_id, scores, is_pending)


def _open_scores(inputs: RankContext, point: ResumePoint | None) -> tuple[ScoreTable | None, bool]:
    """The scores of the run, on rank 0, and whether that of the point is missing. Collective."""
    scores, is_pending = None, False
    if inputs.world.is_rank_zero:
        is_due = due_in(inputs.config) if inputs.data.evaluation else lambda step: False
        inherited = point.state.best if point is not None and not point.is_fork else None
        scores = ScoreTable(inputs.directory.checkpoints, is_due, inherited=inherited)
        kept_step = point.kept_step if point else 0
        scores.rewind(kept_step)
        is_pending = kept_step in scores.waiting()
    return scores, inputs.world.broadcast(is_pending)


def _share_stop(rank: RankContext) -> None:
    """A launcher has given the ranks a file; torchrun, which has started them, does not."""
    if rank.stop.has_file:
        return
    rank.world.run_on_rank_zero(rank.directory.remove_stop_files)
    rank.stop.share_by(rank.directory.stop_file)
    if rank.world.is_rank_zero:
        rank.stack.callback(rank.directory.stop_file.unlink, missing_ok=True)
