"""The state with which a run begins or continues, and a run directory consistent with it.

`count_tokens` verifies that state: it counts the tokens that a resume would lose or read twice,
without the rules of `phases_from`. It compares what all phases before the resume have read of the
current epoch with what the phase after it is going to read.
"""

import logging
from dataclasses import dataclass

from data_pipeline.streams.order import merged, num_tokens
from data_pipeline.system.files import remove_leftovers, write_file
from txl_dist.checkpoint.directory import reading
from txl_dist.checkpoint.reader import (
    check_optimizer_states,
    check_parameters,
    load_fragments,
    load_memory,
)
from txl_dist.config.config_file import dump_run_config
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.tracking.journal import MetricsJournal, last_trained_step
from txl_dist.training.context import Beginning, RankContext
from txl_dist.training.resume import ResumePoint
from txl_dist.training.segment_source import (
    context_segments,
    has_memory_for,
    refill_memory,
    segments_to_replay,
)
from txl_dist.training.state import Phase, TrainState, phases_from
from txl_dist.training.step import TrainStep

log = logging.getLogger(__name__)


def initial_state(rank: RankContext, point: ResumePoint | None) -> TrainState:
    """The state to begin with. Its last phase reads the data of this job."""
    state = point.state if point else TrainState()
    phases = phases_from(
        state.phases,
        rank.data.phase,
        position=state.position,
        context_tokens=context_segments(rank.config) * rank.config.data.tgt_len,
    )
    state = state.model_copy(update={"phases": phases})
    if point is not None and segments_to_replay(rank.config, point, state):
        # The memory is replayed, so it has no gap any more.
        state = state.model_copy(update={"contiguous_from": 0})
    return state


def resume_at(point: ResumePoint, rank: RankContext, step: TrainStep) -> TrainState:
    """Load weights, optimizer state and memory; returns the state of the run. Collective."""
    fault_point("resume")
    engine = step.engine
    # The configs are compatible; this detects changes in the code of the model.
    check_parameters(point.path, point.manifest, engine.shapes)
    check_optimizer_states(point.path, point.manifest, engine.optimizer_states)
    # At a fork, the other run may remove the checkpoint.
    with reading(point.path):
        load_fragments(point.path, point.manifest, engine.fragments_to_load())
        engine.finish_loading(num_steps=point.state.step - point.state.skipped_steps)
        if has_memory_for(rank.config, point):
            step.load_memory(load_memory(point.path, point.manifest, step.lanes))
    state = initial_state(rank, point)
    if num_tokens := refill_memory(rank, step, point, state):
        log.info("memory | replayed %s tokens per lane, unscored", f"{num_tokens:,}")
    return state


def open_run(rank: RankContext, beginning: Beginning) -> int:
    """Make the run directory consistent: no checkpoints, scores or metrics after the beginning.

    Called on rank 0. Returns the last step of the metrics before that.
    """
    directory, evaluation = rank.directory, rank.data.evaluation
    scores, kept_step = beginning.scores, beginning.kept_step
    assert scores is not None
    reached_step = last_trained_step(directory.metrics)
    # Everything here is idempotent: a process killed at any line leaves a directory that the next
    # start makes consistent again.
    directory.checkpoints.open()
    for step in directory.checkpoints.rewind(kept_step, best_step=scores.best_step):
        log.warning("the checkpoint at step %d is renamed to superseded-*", step)
    for path in (directory.config, directory.metrics):
        remove_leftovers(path)
    write_file(directory.config, dump_run_config(rank.job.config).encode())
    redone = {}
    if evaluation and beginning.evaluation_is_pending:
        redone = {kept_step: f"{evaluation.label}/loss"}
    with MetricsJournal(directory.metrics) as journal:
        # A copy of the run from a URL has metrics, but no files of scores.
        journal.truncate_after(kept_step, redone=redone)
    if evaluation:
        scores.write_metrics(directory.metrics, evaluation.label)
    return reached_step


def remaining_work(state: TrainState, *, num_steps: int, evaluation_is_pending: bool) -> str | None:
    """What a run at `state` still has to do, in words; None if it is finished."""
    evaluation = f"the evaluation of step {state.step}" if evaluation_is_pending else ""
    steps = f"steps {state.step + 1} to {num_steps}" if state.step < num_steps else ""
    return ", then ".join(filter(None, (evaluation, steps))) or None


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens of the epoch in which a run resumes."""

    epoch: int
    read: int
    unread: int
    """Tokens that the run is going to read in this epoch, with the tail that no lane gets."""
    lost: int
    """Neither read nor going to be read, if they are enough for one token per lane."""
    twice: int
    """Read already and going to be read again."""
    targets_missing: int
    """Targets up to the resume, less those that were trained on; 0 if no step was skipped."""

    @property
    def line(self) -> str:
        """`tokens lost by this resume 0, read twice 0 | epoch 3: 1,000 tokens read, 500 unread`."""
        trained = f" | targets not trained on {self.targets_missing:,}"
        return (
            f"tokens lost by this resume {self.lost:,}, read twice {self.twice:,}"
            f" | epoch {self.epoch}: {self.read:,} tokens read, {self.unread:,} unread"
            f"{trained if self.targets_missing else ''}"
        )


def count_tokens(
    before: tuple[Phase, ...], state: TrainState, *, tgt_len: int = 1, num_turns: int = 1
) -> TokenCount:
    """Compare the phases of a checkpoint with the last phase of `state`, which continues it."""
    after = state.phases[-1]
    plans = [phase.plan() for phase in before]
    stops = [*(phase.position for phase in before[1:]), state.position]
    progress = [plan.progress(stop) for plan, stop in zip(plans, stops, strict=True)]
    epoch = progress[-1].epoch
    read = [part for past in progress if past.epoch == epoch for part in past.read]
    next_epoch, _, unread = after.plan().progress(state.position)
    unread = unread if next_epoch == epoch else ()
    covered = num_tokens(merged([*read, *unread]))
    missing = before[-1].num_tokens - covered
    targets = sum(
        plan.targets_between(plan.start, stop) for plan, stop in zip(plans, stops, strict=True)
    )
    # Some lanes may be a segment ahead.
    last_plan = before[-1].plan(tgt_len=tgt_len)
    targets += sum(
        last_plan.targets_in_step(state.position, turn, num_turns) for turn in range(state.turn)
    )
    return TokenCount(
        epoch=epoch,
        read=num_tokens(read),
        unread=num_tokens(unread),
        lost=missing if missing >= after.num_lanes else 0,
        twice=num_tokens(read) + num_tokens(unread) - covered,
        targets_missing=targets - state.tokens,
    )
