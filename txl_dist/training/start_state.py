"""The state with which a run begins or continues, and a run directory consistent with it.

`count_tokens` verifies that state: it counts the tokens that a resume would lose or read twice,
without the rules of `phases.py`. It compares what all phases before the resume have read of the
current epoch with what the phase after it is going to read.
"""

import logging
from dataclasses import dataclass

from data_pipeline.streams.remainder import merged, num_tokens
from data_pipeline.system.files import remove_leftovers, write_file
from txl_dist.config.config_file import dump_run_config
from txl_dist.tracking.journal import MetricsJournal
from txl_dist.training.inputs import RankContext
from txl_dist.training.phases import phases_from
from txl_dist.training.replay import context_segments, segments_to_replay
from txl_dist.training.report import redone_metrics
from txl_dist.training.resume_point import ResumePoint
from txl_dist.training.state import Phase, TrainState

log = logging.getLogger(__name__)


def initial_state(rank: RankContext, point: ResumePoint | None) -> TrainState:
    """The state to begin with. Its last phase reads the data of this job."""
    state = point.state if point else TrainState()
    phases = phases_from(
        phases_of(rank, point) if point else (),
        rank.data.phase,
        position=state.position,
        context_tokens=context_segments(rank.config) * rank.config.data.tgt_len,
    )
    # A run without evaluation drops the pending evaluation of the run that it resumes.
    state = state.scored_on(rank.config.evaluation.on if rank.data.evaluation else None)
    if point is not None and not point.is_of(rank.directory.checkpoints):
        # The checkpoints of its earlier steps are those of another run.
        unscored = tuple(step for step in state.unscored_steps if step == state.step)
        state = state.model_copy(update={"unscored_steps": unscored})
    state = state.model_copy(update={"phases": phases})
    if point is not None and segments_to_replay(rank.config, point, state):
        # The memory is replayed, so it has no gap any more.
        state = state.model_copy(update={"contiguous_from": 0})
    return state


def phases_of(rank: RankContext, point: ResumePoint) -> tuple[Phase, ...]:
    """The phases of a checkpoint; before runs had phases, one with the data of this job."""
    num_lanes = len(point.manifest.rank_of_lane)
    return point.state.phases or (rank.data.phase.model_copy(update={"num_lanes": num_lanes}),)


def open_run(rank: RankContext, state: TrainState, point: ResumePoint | None) -> None:
    """Make the run directory consistent with `state`: no later checkpoints, no later metrics."""
    directory, evaluation = rank.directory, rank.data.evaluation
    # Everything here is idempotent: a process killed at any line leaves a directory that the next
    # start makes consistent again.
    directory.checkpoints.open()
    best_step = state.best.step if state.best else None
    source = point.path if point else None
    kept_step = point.kept_step if point else 0
    for step in directory.checkpoints.rewind(kept_step, best_step=best_step, source=source):
        log.warning("the checkpoint at step %d is renamed to superseded-*", step)
    for path in (directory.config, directory.metrics):
        remove_leftovers(path)
    write_file(directory.config, dump_run_config(rank.written_config).encode())
    redone = redone_metrics(state, evaluation.label if evaluation else None)
    with MetricsJournal(directory.metrics) as journal:
        journal.truncate_after(kept_step, redone=redone)


def remaining_work(state: TrainState, *, num_steps: int) -> str | None:
    """What a run at `state` still has to do, in words; None if it is finished."""
    unscored = ", ".join(map(str, state.missing_scores))
    evaluation = f"the evaluation of step {unscored}" if unscored else ""
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


def count_tokens(before: tuple[Phase, ...], state: TrainState) -> TokenCount:
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
    return TokenCount(
        epoch=epoch,
        read=num_tokens(read),
        unread=num_tokens(unread),
        lost=missing if missing >= (after.num_lanes or 0) else 0,
        twice=num_tokens(read) + num_tokens(unread) - covered,
        targets_missing=targets - state.tokens,
    )
