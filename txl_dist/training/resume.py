"""Which checkpoint a run goes on from, and putting it back into the engine and the memory.

Verified before anything of it is used. If the newest is damaged, the one before it is taken, with a
warning that names the steps lost, unless `--strict` forbids it.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from txl_dist.checkpoint.directory import CheckpointDirectory, resolve_checkpoint
from txl_dist.checkpoint.manifest import (
    CheckpointManifest,
    TrainState,
    load_checkpoint_manifest,
)
from txl_dist.checkpoint.reader import (
    check_parameters,
    find_damage,
    load_fragments,
    load_memory,
)
from txl_dist.config.config_file import flatten_config
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.runtime.source_digest import code_description
from txl_dist.runtime.world import World
from txl_dist.training.compatibility import check_config, check_data
from txl_dist.training.data import TrainingData
from txl_dist.training.engine import Engine
from txl_dist.training.job import TrainJob
from txl_dist.training.step import TrainStep

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A verified checkpoint that this job may go on from."""

    path: Path
    manifest: CheckpointManifest

    def state(self, *, evaluates: bool) -> TrainState:
        """Where the run goes on; without a pending evaluation if the run does not evaluate."""
        state = self.manifest.state
        pending = state.evaluation_pending and evaluates
        return state.model_copy(update={"evaluation_pending": pending})

    def step_in(self, checkpoints: CheckpointDirectory) -> int | None:
        """The step, or None if this is another run's checkpoint or one that was set aside."""
        step = self.manifest.state.step
        return step if self.path.resolve() == checkpoints.at(step).resolve() else None


def find_resume_point(job: TrainJob, data: TrainingData, world: World) -> ResumePoint | None:
    """The checkpoint to go on from, or None for a new run; all ranks call it and hash a share.

    Raises CheckpointError (damaged with --strict, none good, another model or mixture), DataError
    (other data), ConfigError (`never` in a directory that has checkpoints).
    """
    directory = CheckpointDirectory(job.run_path)
    if job.resume == "never":
        if directory.steps():
            raise ConfigError(
                f"{directory.run} holds a run up to step {directory.steps()[-1]}, and "
                "--resume never would overwrite it. Choose another directory=PATH, move that one "
                "away, or resume with --resume auto"
            )
        return None
    if job.resume != "auto":
        path = resolve_checkpoint(job.resume)
        return _accepted(job, data, path, _verified(path, world))
    return _newest_good(job, data, directory, world)


def _newest_good(
    job: TrainJob, data: TrainingData, directory: CheckpointDirectory, world: World
) -> ResumePoint | None:
    steps = world.broadcast(directory.steps())
    damage: list[str] = []
    for step in reversed(steps):
        path = directory.at(step)
        try:
            manifest = _verified(path, world)
        except CheckpointError as error:
            if job.strict:
                raise
            damage.append(str(error))
            continue
        if damage and world.is_rank_zero:
            log.warning(
                "%s. Going on from step %d instead; %d steps are lost and will be trained again",
                "; ".join(damage),
                step,
                steps[-1] - step,
            )
        return _accepted(job, data, path, manifest)
    if damage:
        raise CheckpointError(
            f"no checkpoint of {directory.run} is whole: {'; '.join(damage)}. Restore one from a "
            "backup, or start anew in another directory"
        )
    return None


def _verified(path: Path, world: World) -> CheckpointManifest:
    """The manifest once all files are hashed, by all ranks together; the same error on each."""
    try:
        manifest = load_checkpoint_manifest(path)
        names = sorted(manifest.files)[world.rank :: world.num_ranks]
        found = find_damage(path, manifest, names)
    except CheckpointError as error:
        found = [str(error)]
    if damage := sorted({text for texts in world.gather(found) for text in texts}):
        raise CheckpointError(f"{path} is damaged: {'; '.join(damage)}")
    return manifest


def _accepted(
    job: TrainJob, data: TrainingData, path: Path, manifest: CheckpointManifest
) -> ResumePoint:
    check_data(
        manifest,
        data.phase,
        data.vocabulary,
        allowed=job.allow_change,
        allow_data_change=job.allow_data_change,
        where=str(path),
    )
    check_config(
        manifest.run, flatten_config(job.config), allowed=job.allow_change, where=str(path)
    )
    if manifest.written_by != (current := code_description()):
        log.warning(
            "%s was written by %s, this is %s: its losses may differ from those of a run that was "
            "never stopped",
            path,
            manifest.written_by,
            current,
        )
    return ResumePoint(path, manifest)


def restore(point: ResumePoint, engine: Engine, step: TrainStep) -> None:
    """Weights, optimizer state and the memory of this rank's lanes, whoever wrote them."""
    check_parameters(point.path, point.manifest, engine.shapes)
    load_fragments(point.path, point.manifest, engine.fragments_to_load())
    engine.loaded(num_steps=point.manifest.state.step)
    step.load_memory(load_memory(point.path, point.manifest, step.lanes))


def remaining_work(state: TrainState, *, num_steps: int) -> str | None:
    """What a run at `state` has left to do, in words; None if nothing."""
    evaluation = f"the evaluation of step {state.step}" if state.evaluation_pending else ""
    steps = f"steps {state.step + 1} to {num_steps}" if state.step < num_steps else ""
    return ", then ".join(filter(None, (evaluation, steps))) or None
