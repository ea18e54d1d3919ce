"""Builds the Trainer of one rank: TrainJob -> data -> model -> engine -> loop.

Every launcher uses this one chain. Some of its parts are collective, so every rank has to build all
of them in this order.

    start_state.py         the state to begin with, and a run directory consistent with it
    build_computation.py   step, stream of segments, saver, recovery
    build_reporting.py     utilisation, tracker, report, profiler
"""

import logging
from contextlib import ExitStack

from txl_dist.runtime.fault_injection import fault_point
from txl_dist.runtime.stop_request import StopRequest
from txl_dist.runtime.world import World
from txl_dist.tracking.journal import last_trained_step
from txl_dist.tracking.tracker import Tracker
from txl_dist.training.build_computation import (
    build_recovery,
    build_saver,
    build_step,
    refill_memory,
)
from txl_dist.training.build_reporting import (
    build_profiler,
    build_report,
    describe_start,
    measure_utilisation,
    start_tracker,
)
from txl_dist.training.data import TrainingData
from txl_dist.training.duration import resolve_duration
from txl_dist.training.engine.averaging import describe_average
from txl_dist.training.evaluator import build_evaluator
from txl_dist.training.job import TrainJob, require_same_job
from txl_dist.training.loop import Trainer
from txl_dist.training.rank_context import RankContext
from txl_dist.training.remote_resume import download_newest
from txl_dist.training.resume import find_resume_point
from txl_dist.training.resume_point import restore, run_id_of
from txl_dist.training.run_directory import RunDirectory, begin_attempt
from txl_dist.training.scoring_worker import OpenWorkers, scoring_process
from txl_dist.training.start_state import count_tokens, initial_state, open_run, phases_of
from txl_dist.training.statistics import WeightStatistics
from txl_dist.training.worker_evaluation import build_worker_evaluation

log = logging.getLogger(__name__)

LOCK_TIMEOUT_SECONDS = 30.0
"""After a failure Ray may start a new rank 0 shortly before the old one has released the lock."""


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
    stop = StopRequest() if stop is None else stop
    # Before the rendezvous: wrong data or config must not cost one.
    data = TrainingData.open(job.config, num_ranks=world.num_ranks)
    written_config = job.config
    job = job.model_copy(update={"config": resolve_duration(job.config, data.plan)})
    world.join(timeout_seconds=job.config.training.rank_timeout_seconds)
    log.info("%d of %d ranks are up", world.num_ranks, world.num_ranks)
    require_same_job(job.config, data, world)
    world.run_on_rank_zero(lambda: _lock(job, directory, stack))
    # After a change of settings (`training.changes`) the attempt goes on. Its newest checkpoint is
    # in the run directory, so the run continues even if its URL cannot be reached.
    is_new_attempt = directory.checkpoints.attempt is None
    if is_new_attempt:
        download_newest(job, data, world)
    point, newest_step = find_resume_point(job, data, world), directory.checkpoints.newest_step()
    if is_new_attempt:
        # Only after all checks: beginning an attempt fences the one that is running.
        directory.checkpoints.attempt = begin_attempt(
            job, directory, world, run_id=run_id_of(point, directory.checkpoints)
        )
        if world.broadcast(directory.checkpoints.newest_step() != newest_step):
            point = find_resume_point(job, data, world)  # the older attempt has saved meanwhile
        _share_stop(stop, directory, world, run_stack or stack)
    settings_step = point.settings_step if point else 0
    config = job.config.after_step(settings_step)
    run_id = world.broadcast(run_id_of(point, directory.checkpoints))
    if config != job.config:
        data = TrainingData.open(config, num_ranks=world.num_ranks)
    rank = RankContext(
        job, world, directory, stack, data, config, written_config, run_id, open_workers
    )
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
    reached_step = last_trained_step(directory.metrics) if world.is_rank_zero else 0
    world.run_on_rank_zero(lambda: open_run(rank, state, point))
    # Measured before the tracking process starts and competes for the processor.
    utilisation = measure_utilisation(rank)
    tracker = tracker or start_tracker(rank, run_stack or stack, new_run=point is None)
    report = build_report(
        rank, utilisation, state, point, reached_step=reached_step, is_new_attempt=is_new_attempt
    )
    report.event("%s", describe_start(rank, step, state, point))
    if point is not None:
        report.event("%s", count_tokens(phases_of(rank, point), state).line)
    report.plan(config, data)
    if config.optimizer.averaging and data.evaluation:
        report.event("evaluation | scores the %s", describe_average(config.optimizer))
    report.phase(state)
    if point is not None and (num_tokens := refill_memory(rank, step, point, state)):
        report.event("memory | replayed %s tokens per lane, unscored", f"{num_tokens:,}")
    last_step = config.last_step_with(settings_step)
    saver = build_saver(rank, step, tracker, point, is_new_attempt=is_new_attempt)
    recovery = build_recovery(rank, step, report, saver, last_step=last_step)
    plan, segments = recovery.read_from(state)
    return Trainer(
        config=config,
        plan=plan,
        segments=segments,
        step=step,
        report=report,
        stop=stop,
        saver=saver,
        tracker=tracker,
        evaluate=build_evaluator(config, data, step.engine, world),
        worker_evaluation=build_worker_evaluation(rank),
        evaluated_data=data.evaluation.corpus.manifest.digest if data.evaluation else None,
        state=state,
        last_step=last_step,
        recovery=recovery,
        profiler=build_profiler(rank),
    )


def _share_stop(stop: StopRequest, directory: RunDirectory, world: World, stack: ExitStack) -> None:
    """A launcher has given the ranks a file; torchrun, which has started them, does not."""
    if stop.has_file:
        return
    world.run_on_rank_zero(directory.remove_stop_files)
    stop.share_by(directory.stop_file)
    if world.is_rank_zero:
        stack.callback(directory.stop_file.unlink, missing_ok=True)


def _lock(job: TrainJob, directory: RunDirectory, stack: ExitStack) -> None:
    stack.enter_context(
        directory.locked(timeout_seconds=LOCK_TIMEOUT_SECONDS, force=job.force_unlock)
    )
    directory.checkpoints.rename_copies()
