"""The fourth stage of a start: the parts of a run, and the state with which it begins."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from txl_dist.runtime.fault_injection import fault_point
from txl_dist.tracking.process import TrackingProcess
from txl_dist.training.begin import Beginning, RankContext
from txl_dist.training.computation import build_step
from txl_dist.training.observer import Observers
from txl_dist.training.observers import build_observers, start_tracker
from txl_dist.training.recovery import DivergenceDump, Recovery
from txl_dist.training.report import log_start
from txl_dist.training.resume_point import ResumePoint, restore
from txl_dist.training.saving import RunSaver, open_saver
from txl_dist.training.score_watch import ScoreWatch, wait_for_scores
from txl_dist.training.segment_source import refill_memory
from txl_dist.training.start_state import initial_state, open_run
from txl_dist.training.state import TrainState
from txl_dist.training.step import TrainStep

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run consists of, and its state at the beginning."""

    step: TrainStep
    state: TrainState
    observers: Observers
    wait_for_scores: Callable[[object], bool] | None
    saver: RunSaver
    recovery: Recovery


def build_parts(
    rank: RankContext, beginning: Beginning, run_stack: ExitStack, tracker: TrackingProcess | None
) -> Parts:
    """Build, restore and describe everything that the loop uses. Collective."""
    config, world = rank.config, rank.world
    point, scores = beginning.point, beginning.scores
    fault_point("engine")
    step = build_step(rank)
    log.info("the model is built")
    if point is not None:
        restore(point, config, step.engine, step)
    state = initial_state(rank, point)
    reached_steps = world.run_on_all(lambda: open_run(rank, beginning) if scores else 0)
    # Before the tracker: the peak is measured without its process.
    observers = build_observers(
        rank,
        state,
        kept_step=beginning.kept_step,
        reached_step=reached_steps[0],
        is_new_attempt=beginning.is_new_attempt,
    )
    tracker = tracker or start_tracker(rank, run_stack)
    if world.is_rank_zero:
        log_start(rank, beginning, state, shapes=step.engine.shapes)
    if point is not None and (num_tokens := refill_memory(rank, step, point, state)):
        observers.event("memory | replayed %s tokens per lane, unscored", f"{num_tokens:,}")
    wait = _wait_for_scores(rank, beginning, observers)
    saver = open_saver(rank, beginning, step, tracker)
    recovery = _build_recovery(rank, step, observers, saver, beginning.settings_step)
    return Parts(step, state, observers, wait, saver, recovery)


def _wait_for_scores(
    rank: RankContext, beginning: Beginning, observers: Observers
) -> Callable[[object], bool] | None:
    """The wait at the end of a run whose checkpoints another process scores, started by rank 0."""
    if rank.data.evaluation is None or rank.config.evaluation.on != "workers":
        return None
    watch = None
    if beginning.scores is not None:
        watch = ScoreWatch(
            rank.directory,
            beginning.scores,
            on=rank.evaluate_on,
            timeout_seconds=rank.config.training.rank_timeout_seconds,
            announce=observers.score,
        )
        observers.all.append(watch)
        rank.stack.callback(watch.close)
    return partial(wait_for_scores, rank.world, watch)


def _build_recovery(
    rank: RankContext,
    step: TrainStep,
    observers: Observers,
    saver: RunSaver,
    settings_step: int,
) -> Recovery:
    def resume_at(point: ResumePoint) -> TrainState:
        restore(point, rank.config, step.engine, step)
        state = initial_state(rank, point)
        refill_memory(rank, step, point, state)
        return state

    return Recovery(
        config=rank.config,
        step=step,
        observers=observers,
        saver=saver,
        dump=DivergenceDump(
            rank.directory.events, rank.world.rank, step.lanes, rank.data, rank.config
        ),
        checkpoints=rank.directory.checkpoints,
        last_step=rank.config.last_step_with(settings_step),
        resume_at=resume_at,
    )
