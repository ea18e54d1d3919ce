"""Builds the Trainer of one rank, in five stages. Every launcher uses this one function.

    inputs   config, data and the other ranks, checked (begin.py)
    attempt  the lock, and the attempt that ends older ones (begin.py)
    point    the checkpoint to resume from (begin.py)
    parts    what computes, saves and observes, and the state to begin with
    trainer  the loop over these, and the segments that it reads

Some stages are collective, so every rank has to go through all of them in this order.
"""

from contextlib import ExitStack

from txl_dist.runtime.stop import StopRequest
from txl_dist.runtime.world import World
from txl_dist.training.begin import begin_run, open_inputs
from txl_dist.training.computation import build_evaluator, build_step
from txl_dist.training.job import TrainJob
from txl_dist.training.loop import Trainer
from txl_dist.training.observers import build_observers
from txl_dist.training.recovery import Recovery
from txl_dist.training.report import log_start
from txl_dist.training.run_directory import RunDirectory
from txl_dist.training.saving import open_saver
from txl_dist.training.score_watch import open_score_watch
from txl_dist.training.segment_source import SegmentSource
from txl_dist.training.start_state import initial_state, open_run, resume_at
from txl_dist.training.tracked import TrackingProcess, start_tracker


def build_trainer(
    job: TrainJob,
    world: World,
    directory: RunDirectory,
    stack: ExitStack,
    stop: StopRequest | None = None,
    *,
    run_stack: ExitStack | None = None,
    tracker: TrackingProcess | None = None,
) -> Trainer:
    """Open the data, join the ranks, resume or initialise, and build all parts of the run.

    Collective. Files, locks and threads are closed with `stack`; the tracker with `run_stack`, if
    it is given, and used again as `tracker` after a change of settings.
    """
    stop, run_stack = StopRequest() if stop is None else stop, run_stack or stack
    inputs = open_inputs(job, world, directory, stack)
    beginning = begin_run(inputs, stop, run_stack)
    rank = inputs.after_step(beginning.settings_step, run_id=beginning.run_id)
    step, point = build_step(rank), beginning.point
    state = resume_at(point, rank, step) if point else initial_state(rank, None)
    # Before the observers, which continue its files.
    reached_steps = world.run_on_all(lambda: open_run(rank, beginning) if beginning.scores else 0)
    # Before the tracker: the peak is measured without its process.
    observers = build_observers(rank, beginning, state, reached_step=reached_steps[0])
    tracker = tracker or start_tracker(rank, run_stack)
    if world.is_rank_zero:
        log_start(rank, beginning, state, shapes=step.engine.shapes)
    wait = open_score_watch(rank, beginning, observers)
    saver = open_saver(rank, beginning, step, tracker)
    recovery = Recovery(rank, step, observers, saver, beginning.settings_step)
    segments = SegmentSource(rank, step)
    plan, first_segments = segments.open_at(state)
    return Trainer(
        config=rank.config,
        plan=plan,
        segments=first_segments,
        read_from=segments.open_at,
        step=step,
        observers=observers,
        stop=stop,
        saver=saver,
        evaluate=build_evaluator(rank, step.engine),
        is_evaluated=rank.data.evaluation is not None,
        scores=beginning.scores,
        wait_for_scores=wait,
        state=state,
        last_step=recovery.last_step,
        recovery=recovery,
        evaluation_is_pending=beginning.evaluation_is_pending,
    )
