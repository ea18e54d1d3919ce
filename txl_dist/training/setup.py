"""Builds the Trainer of one rank, in five stages. Every launcher uses this one function.

    inputs.py      inputs    config, data and the other ranks, checked
    begin_run      attempt   the lock, and the attempt that ends older ones
                   point     the checkpoint to resume from
    _build_parts   parts     what computes, saves and observes, and the state to begin with
    build_trainer  trainer   the loop over these

Some stages are collective, so every rank has to go through all of them in this order.
"""

import logging
from contextlib import ExitStack
from typing import NamedTuple

from txl_dist.runtime.fault_injection import fault_point
from txl_dist.runtime.stop_request import StopRequest
from txl_dist.runtime.world import World
from txl_dist.tracking.journal import last_trained_step
from txl_dist.tracking.tracker import Tracker
from txl_dist.training.build_reporting import (
    build_profiler,
    build_report,
    describe_start,
    measure_utilisation,
    start_tracker,
)
from txl_dist.training.computation import SegmentSource, build_step, refill_memory
from txl_dist.training.divergence_dump import DivergenceDump
from txl_dist.training.engine.averaging import describe_average
from txl_dist.training.evaluator import build_evaluator
from txl_dist.training.inputs import RankContext, open_inputs
from txl_dist.training.job import TrainJob
from txl_dist.training.loop import Trainer
from txl_dist.training.recovery import Recovery
from txl_dist.training.remote_resume import download_newest
from txl_dist.training.report import Report
from txl_dist.training.resume import find_resume_point
from txl_dist.training.resume_point import ResumePoint, restore, run_id_of
from txl_dist.training.run_directory import RunDirectory, begin_attempt
from txl_dist.training.saving import RunSaver, open_saver
from txl_dist.training.scoring_worker import OpenWorkers, scoring_process
from txl_dist.training.start_state import count_tokens, initial_state, open_run, phases_of
from txl_dist.training.state import TrainState
from txl_dist.training.statistics import WeightStatistics
from txl_dist.training.step import TrainStep
from txl_dist.training.worker_evaluation import build_worker_evaluation

log = logging.getLogger(__name__)

LOCK_TIMEOUT_SECONDS = 30.0
"""After a failure Ray may start a new rank 0 shortly before the old one has released the lock."""


class Beginning(NamedTuple):
    """Where a start begins."""

    point: ResumePoint | None
    """None: a new run."""
    is_new_attempt: bool
    """False after a change of settings, for which the attempt goes on."""

    @property
    def settings_step(self) -> int:
        """The run continues with the settings after this step."""
        return self.point.settings_step if self.point else 0


def build_trainer(
    job: TrainJob,
    world: World,
    directory: RunDirectory,
    stack: ExitStack,
    stop: StopRequest | None = None,
    *,
    run_stack: ExitStack | None = None,
    tracker: Tracker | None = None,
    open_workers: OpenWorkers = scoring_process,
) -> Trainer:
    """Open the data, join the ranks, resume or initialise, and build all parts of the run.

    Collective. Files, locks and threads are closed with `stack`; the tracker with `run_stack`, if
    it is given, and used again as `tracker` after a change of settings.
    """
    stop, run_stack = StopRequest() if stop is None else stop, run_stack or stack
    inputs = open_inputs(job, world, directory, stack, open_workers=open_workers)
    beginning = begin_run(inputs, stop, run_stack)
    run_id = world.broadcast(run_id_of(beginning.point, directory.checkpoints))
    rank = inputs.after_step(beginning.settings_step, run_id=run_id)
    parts = _build_parts(rank, beginning, run_stack, tracker)
    segments = SegmentSource(rank, parts.step)
    plan, first_segments = segments.open_at(parts.state)
    last_step = rank.config.last_step_with(beginning.settings_step)
    return Trainer(
        config=rank.config,
        plan=plan,
        segments=first_segments,
        read_from=segments.open_at,
        step=parts.step,
        report=parts.report,
        stop=stop,
        saver=parts.saver,
        tracker=parts.tracker,
        evaluate=build_evaluator(rank.config, rank.data, parts.step.engine, world),
        worker_evaluation=build_worker_evaluation(rank),
        evaluated_data=rank.data.evaluation.corpus.manifest.digest
        if rank.data.evaluation
        else None,
        state=parts.state,
        last_step=last_step,
        recovery=_build_recovery(rank, parts, last_step=last_step),
        profiler=build_profiler(rank),
    )


def begin_run(inputs: RankContext, stop: StopRequest, run_stack: ExitStack) -> Beginning:
    """Take the lock, find the checkpoint to resume from, and begin an attempt. Collective."""
    job, world, directory, data = inputs.job, inputs.world, inputs.directory, inputs.data
    world.run_on_rank_zero(lambda: _lock(inputs))
    checkpoints = directory.checkpoints
    # After a change of settings (`training.changes`) the attempt goes on. Its newest checkpoint is
    # in the run directory, so the run continues even if its URL cannot be reached.
    if checkpoints.attempt is not None:
        return Beginning(find_resume_point(job, data, world), is_new_attempt=False)
    download_newest(job, data, world)
    point, newest_step = find_resume_point(job, data, world), checkpoints.newest_step()
    # Only after all checks: beginning an attempt fences the one that is running.
    run_id = run_id_of(point, checkpoints)
    checkpoints.attempt = begin_attempt(job, directory, world, run_id=run_id)
    if world.broadcast(checkpoints.newest_step() != newest_step):
        point = find_resume_point(job, data, world)  # the older attempt has saved meanwhile
    _share_stop(stop, directory, world, run_stack)
    return Beginning(point, is_new_attempt=True)


def _lock(inputs: RankContext) -> None:
    directory, force = inputs.directory, inputs.job.force_unlock
    inputs.stack.enter_context(directory.locked(timeout_seconds=LOCK_TIMEOUT_SECONDS, force=force))
    directory.checkpoints.rename_copies()


def _share_stop(stop: StopRequest, directory: RunDirectory, world: World, stack: ExitStack) -> None:
    """A launcher has given the ranks a file; torchrun, which has started them, does not."""
    if stop.has_file:
        return
    world.run_on_rank_zero(directory.remove_stop_files)
    stop.share_by(directory.stop_file)
    if world.is_rank_zero:
        stack.callback(directory.stop_file.unlink, missing_ok=True)


class Parts(NamedTuple):
    """What a run consists of, and its state at the beginning."""

    step: TrainStep
    state: TrainState
    report: Report
    tracker: Tracker | None
    saver: RunSaver


def _build_parts(
    rank: RankContext, beginning: Beginning, run_stack: ExitStack, tracker: Tracker | None
) -> Parts:
    """Build, restore and describe everything that the loop uses. Collective."""
    config, world, point = rank.config, rank.world, beginning.point
    fault_point("engine")
    step = build_step(rank)
    log.info("the model is built")
    if point is not None:
        restore(point, config, step.engine, step)
    if config.training.statistics_interval_steps is not None:
        step.statistics = WeightStatistics(
            step.engine, world, interval_steps=config.training.statistics_interval_steps
        )
    state = initial_state(rank, point)
    reached_step = last_trained_step(rank.directory.metrics) if world.is_rank_zero else 0
    world.run_on_rank_zero(lambda: open_run(rank, state, point))
    # Measured before the tracking process starts and competes for the processor.
    utilisation = measure_utilisation(rank)
    tracker = tracker or start_tracker(rank, run_stack, new_run=point is None)
    report = build_report(
        rank,
        utilisation,
        state,
        point,
        reached_step=reached_step,
        is_new_attempt=beginning.is_new_attempt,
    )
    report.event("%s", describe_start(rank, step, state, point))
    if point is not None:
        report.event("%s", count_tokens(phases_of(rank, point), state).line)
    report.plan(config, rank.data)
    if config.optimizer.averaging and rank.data.evaluation:
        report.event("evaluation | scores the %s", describe_average(config.optimizer))
    report.phase(state)
    if point is not None and (num_tokens := refill_memory(rank, step, point, state)):
        report.event("memory | replayed %s tokens per lane, unscored", f"{num_tokens:,}")
    saver = open_saver(rank, step, tracker, point, is_new_attempt=beginning.is_new_attempt)
    return Parts(step, state, report, tracker, saver)


def _build_recovery(rank: RankContext, parts: Parts, *, last_step: int) -> Recovery:
    step = parts.step

    def resume_at(point: ResumePoint) -> TrainState:
        restore(point, rank.config, step.engine, step)
        state = initial_state(rank, point)
        refill_memory(rank, step, point, state)
        return state

    return Recovery(
        config=rank.config,
        step=step,
        report=parts.report,
        saver=parts.saver,
        dump=DivergenceDump(
            rank.directory.events, rank.world.rank, step.lanes, rank.data, rank.config
        ),
        checkpoints=rank.directory.checkpoints,
        last_step=last_step,
        resume_at=resume_at,
    )
