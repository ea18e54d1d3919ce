"""Builds the Trainer of one rank, in five stages. Every launcher uses this one function.

    begin.py   inputs   config, data and the other ranks, checked
               attempt  the lock, and the attempt that ends older ones
               point    the checkpoint to resume from
    parts.py   parts    what computes, saves and observes, and the state to begin with
    setup.py   trainer  the loop over these, and the segments that it reads

Some stages are collective, so every rank has to go through all of them in this order.
"""

from contextlib import ExitStack

from txl_dist.runtime.stop import StopRequest
from txl_dist.runtime.world import World
from txl_dist.tracking.process import TrackingProcess
from txl_dist.training.begin import begin_run, open_inputs
from txl_dist.training.computation import build_evaluator
from txl_dist.training.job import TrainJob
from txl_dist.training.loop import Trainer
from txl_dist.training.parts import build_parts
from txl_dist.training.run_directory import RunDirectory
from txl_dist.training.segment_source import SegmentSource


def build_trainer(
    job: TrainJob,
    world: World,
    directory: RunDirectory,
    stack: ExitStack,
    stop: StopRequest | None = None,
    *,
    run_stack: ExitStack | None = None,
    tracker: TrackingProcess | None = None,
    evaluate_on: str = "processes",
) -> Trainer:
    """Open the data, join the ranks, resume or initialise, and build all parts of the run.

    Collective. Files, locks and threads are closed with `stack`; the tracker with `run_stack`, if
    it is given, and used again as `tracker` after a change of settings.
    """
    stop, run_stack = StopRequest() if stop is None else stop, run_stack or stack
    inputs = open_inputs(job, world, directory, stack, evaluate_on=evaluate_on)
    beginning = begin_run(inputs, stop, run_stack)
    rank = inputs.after_step(beginning.settings_step, run_id=beginning.run_id)
    parts = build_parts(rank, beginning, run_stack, tracker)
    segments = SegmentSource(rank, parts.step)
    plan, first_segments = segments.open_at(parts.state)
    return Trainer(
        config=rank.config,
        plan=plan,
        segments=first_segments,
        read_from=segments.open_at,
        step=parts.step,
        observers=parts.observers,
        stop=stop,
        saver=parts.saver,
        evaluate=build_evaluator(rank, parts.step.engine),
        is_evaluated=rank.data.evaluation is not None,
        scores=beginning.scores,
        wait_for_scores=parts.wait_for_scores,
        state=parts.state,
        last_step=parts.recovery.last_step,
        recovery=parts.recovery,
        evaluation_is_pending=beginning.evaluation_is_pending,
    )
