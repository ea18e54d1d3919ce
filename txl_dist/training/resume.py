"""Selects the checkpoint that a run resumes from.

If the newest one is damaged, the run resumes from the one before it and logs how many steps are
lost, unless `--strict` forbids that. `--resume PATH` goes back only once (decision 43).
"""

import logging
from contextlib import suppress
from dataclasses import replace

from txl_dist.checkpoint.directory import CheckpointDirectory, resolve_checkpoint
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.runtime.process import code_description
from txl_dist.runtime.world import World
from txl_dist.training.compatibility import require_compatible
from txl_dist.training.data import TrainingData
from txl_dist.training.given_checkpoint import changed_settings, named_checkpoint
from txl_dist.training.job import TrainJob
from txl_dist.training.remote_resume import replace_by_copy
from txl_dist.training.resume_point import ResumePoint, state_at, verify_point
from txl_dist.training.state import GivenCheckpoint, TrainState, load_state

log = logging.getLogger(__name__)


def find_resume_point(job: TrainJob, data: TrainingData, world: World) -> ResumePoint | None:
    """The checkpoint to resume from, or None for a new run. Collective: each rank hashes a part.

    Raises CheckpointError (damaged with --strict, none intact, another model or mixture), DataError
    (other data), ConfigError (`never` in a directory that has checkpoints).
    """
    directory = CheckpointDirectory(job.run_path)
    if job.resume == "never":
        if steps := directory.steps():
            raise ConfigError(
                f"{directory.run} holds a run up to step {steps[-1]}, and --resume never would "
                "overwrite it. Choose another directory=PATH, move that run to another place, or "
                "resume it with --resume auto"
            )
        return None
    _require_checkpoints(job, directory, world)
    if job.resume != "auto":
        named = world.broadcast(named_checkpoint(job, data))
        point = _continuation(named, job, directory, world) or _given(named, job, world)
    elif world.broadcast(directory.steps()):
        point = _newest_intact(job, directory, world)
    else:
        return None
    require_compatible(point.manifest, point.state, point.path, job=job, data=data)
    _warn_of_other_code(point)
    return replace(point, kept_step=_kept_step(point, directory))


def _kept_step(point: ResumePoint, checkpoints: CheckpointDirectory) -> int:
    step = point.step_in(checkpoints)
    if step is not None or not point.is_of(checkpoints):
        return step or 0
    # Superseded: what both trajectories have in common.
    abandoned, common = load_state(point.path, point.manifest), 0
    for step in checkpoints.steps():
        with suppress(CheckpointError):
            if step < abandoned.step and abandoned.continues(state_at(step, checkpoints)):
                common = step
    return common


def _given(named: GivenCheckpoint, job: TrainJob, world: World) -> ResumePoint:
    """The checkpoint that `--resume` names. Earlier divergence does not count any more."""
    point = verify_point(resolve_checkpoint(job.resume), world)
    divergence = point.state.divergence.model_copy(update={"event_steps": ()})
    update = {"resumed_from": named, "divergence": divergence}
    return replace(point, state=point.state.model_copy(update=update))


def _continuation(
    named: GivenCheckpoint, job: TrainJob, directory: CheckpointDirectory, world: World
) -> ResumePoint | None:
    """The newest checkpoint, if this command has gone to the given one before.

    Schedulers repeat a command: going back every time would lose what was trained since. None if
    the run did not come from there, or with other settings: that is another command.
    """
    newest, damage = world.broadcast(_newest_readable(directory))
    before = newest.resumed_from if newest else None
    if newest is None or before is None or before.path != named.path:
        if damage and job.strict:
            raise _strict_error(damage[0], directory)
        if damage:
            log.warning("%s. The run goes to %s", "; ".join(damage), job.resume)
        return None
    if changed := changed_settings(before, named, step=newest.step):
        log.warning(
            "this run has resumed from %s before, with another %s: it goes back there. To continue "
            "with other settings instead, leave --resume out",
            job.resume,
            ", ".join(changed),
        )
        return None
    try:
        point = _newest_intact(job, directory, world, resumed_from=before)
    except CheckpointError as error:
        if job.strict:
            raise
        log.warning("%s. The run goes back to %s", error, job.resume)
        return None
    log.info(
        "this run has resumed from %s before: it continues from step %d. To begin there once more, "
        "choose another directory=PATH",
        job.resume,
        point.state.step,
    )
    return point


def _newest_readable(directory: CheckpointDirectory) -> tuple[TrainState | None, list[str]]:
    """The state of the newest checkpoint whose manifest is readable, and the damage of others."""
    damage: list[str] = []
    for step in reversed(directory.steps()):
        try:
            return state_at(step, directory), damage
        except CheckpointError as error:
            damage.append(str(error))
    return None, damage


def _steps_since(begin: GivenCheckpoint | None, directory: CheckpointDirectory) -> list[int]:
    """Steps of the checkpoints of the trajectory that began there, and of damaged ones between."""
    steps: list[int] = []
    for step in reversed(directory.steps()):
        with suppress(CheckpointError):
            if begin is not None and state_at(step, directory).resumed_from != begin:
                break
        steps.insert(0, step)
    return steps


def _require_checkpoints(job: TrainJob, directory: CheckpointDirectory, world: World) -> None:
    """Raise CheckpointError if the run had checkpoints, which are gone."""
    latest = directory.run / "LATEST"
    is_empty = not directory.steps()
    has_latest, superseded = world.broadcast(
        (latest.exists(), directory.superseded()) if is_empty else (False, [])
    )
    # A start with --resume PATH that was killed before it had saved a checkpoint may leave only
    # superseded ones; the same command goes there again.
    if not (has_latest or superseded) or (superseded and job.resume != "auto"):
        return
    if superseded:
        raise CheckpointError(
            f"{directory.path} has only superseded-* checkpoints: a start with --resume PATH was "
            "killed before it had saved one. Run that command again, or name one of them: --resume "
            f"{max(superseded)}"
        )
    raise CheckpointError(
        f"{latest} says that this run has checkpoints, but {directory.path} has none: they were "
        "moved or removed, or their storage is not mounted. Bring them back and run the same "
        f"command again. To lose that run and begin again: rm {latest}"
    )


def _newest_intact(
    job: TrainJob,
    directory: CheckpointDirectory,
    world: World,
    *,
    resumed_from: GivenCheckpoint | None = None,
) -> ResumePoint:
    """The newest intact checkpoint, of the trajectory that began at `resumed_from` if given."""
    # From rank 0: on a network file system the ranks may see different directory listings.
    steps = world.broadcast(_steps_since(resumed_from, directory))
    damage: list[str] = []
    for step in reversed(steps):
        try:
            point = _verified(step, job, directory, world)
        except CheckpointError as error:
            if job.strict:
                raise _strict_error(str(error), directory) from None
            damage.append(str(error))
            continue
        if damage and world.is_rank_zero:
            log.warning(
                "%s. Resuming from step %d instead; %d steps are lost and will be trained again",
                "; ".join(damage),
                step,
                steps[-1] - step,
            )
        return point
    since = f" since {resumed_from.path}" if resumed_from else ""
    raise CheckpointError(
        f"all checkpoints of {directory.run}{since} are damaged: {'; '.join(damage)}. Restore one "
        "from a backup, or start a new run in another directory"
    )


def _verified(
    step: int, job: TrainJob, directory: CheckpointDirectory, world: World
) -> ResumePoint:
    """The checkpoint of a step, or its copy at `training.checkpoint_url` if it is damaged."""
    try:
        return verify_point(directory.at(step), world)
    except CheckpointError as error:
        if not replace_by_copy(step, job, world):
            raise
        log.warning("%s. It was replaced by its copy", error)
    return verify_point(directory.at(step), world)


def _strict_error(damage: str, directory: CheckpointDirectory) -> CheckpointError:
    return CheckpointError(
        f"{damage}. Restore it from a backup; without --strict the run resumes from the newest "
        f"intact checkpoint before it (txl checkpoint list {directory.run})"
    )


def _warn_of_other_code(point: ResumePoint) -> None:
    # A warning, not an error: most changes of the code do not change losses.
    if point.manifest.written_by != (current := code_description()):
        log.warning(
            "%s was written by %s, this is %s: the losses may differ from those of an "
            "uninterrupted run",
            point.path,
            point.manifest.written_by,
            current,
        )
