"""The state with which a run begins or continues, and a run directory consistent with it."""

import logging

from data_pipeline.system.files import remove_leftovers, write_file
from txl_dist.config.config_file import dump_run_config
from txl_dist.tracking.journal import MetricsJournal
from txl_dist.training.phases import phases_from
from txl_dist.training.rank_context import RankContext
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
