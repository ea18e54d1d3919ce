"""ResumePoint: a checkpoint from which a run resumes, verified completely before it is used."""

import logging
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from txl_dist.checkpoint.directory import CheckpointDirectory, reading
from txl_dist.checkpoint.manifest import CheckpointManifest, load_checkpoint_manifest
from txl_dist.checkpoint.reader import (
    check_optimizer_states,
    check_parameters,
    find_damage,
    load_fragments,
    load_memory,
)
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import CheckpointError
from txl_dist.model.memory import memory_kind
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.runtime.world import World
from txl_dist.training.engine import Engine
from txl_dist.training.state import TrainState, load_state
from txl_dist.training.step import TrainStep

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A verified checkpoint that this job may resume from."""

    path: Path
    manifest: CheckpointManifest
    state: TrainState
    kept_step: int = 0
    """The last step in the run directory that belongs to the trajectory of this checkpoint."""

    def is_of(self, checkpoints: CheckpointDirectory) -> bool:
        """Whether the checkpoint belongs to this run, superseded or not."""
        is_in = _is_same(self.path.parent, checkpoints.path)
        return is_in or self.step_in(checkpoints) is not None

    def has_memory_for(self, config: RunConfig) -> bool:
        """Whether its memory fits: the same lanes, and rows that can be loaded."""
        return len(self.manifest.rank_of_lane) == config.data.num_lanes and memory_kind(
            config.model
        ).fits(self.manifest.architecture)

    def step_in(self, checkpoints: CheckpointDirectory) -> int | None:
        """The step of this checkpoint, or of its copy, in a run; None if it is superseded there."""
        own = checkpoints.at(self.state.step)
        if _is_same(self.path, own):
            return self.state.step
        with suppress(CheckpointError):
            save_id = load_checkpoint_manifest(own).save_id
            if save_id is not None and save_id == self.manifest.save_id:
                return self.state.step
        return None


def run_id_of(point: ResumePoint | None, checkpoints: CheckpointDirectory) -> str:
    """The id of the run in its checkpoints; a new one if it begins, or begins at another run's."""
    own = point.manifest.run_id if point and point.is_of(checkpoints) else None
    return own or uuid.uuid4().hex


def newest_before(step: int, directory: CheckpointDirectory, world: World) -> ResumePoint | None:
    """The newest intact checkpoint of an earlier step than `step`, or None. Collective."""
    for earlier in reversed(world.broadcast(directory.steps())):
        if earlier < step:
            try:
                return verify_point(directory.at(earlier), world)
            except CheckpointError as error:
                log.warning("%s", error)
    return None


def verify_point(path: Path, world: World) -> ResumePoint:
    """Hash all files, each rank a part of them; every rank raises the same error."""
    try:
        with reading(path):
            manifest = load_checkpoint_manifest(path)
            state = load_state(path, manifest)
            # Each rank hashes 1/num_ranks of the files, not only those that it will read.
            names = sorted(manifest.files)[world.rank :: world.num_ranks]
            problems = find_damage(path, manifest, names)
    except CheckpointError as error:
        problems = [str(error)]
    if damage := sorted({text for texts in world.all_gather(problems) for text in texts}):
        raise CheckpointError(f"{path} is damaged: {'; '.join(damage)}")
    return ResumePoint(path, manifest, state)


def _is_same(path: Path, other: Path) -> bool:
    """Whether two paths are one directory, also through links or another mount."""
    with suppress(OSError):
        return path.samefile(other)
    return False


def restore(point: ResumePoint, config: RunConfig, engine: Engine, step: TrainStep) -> None:
    """Load weights, optimizer state and, if it fits, the memory of this rank's lanes."""
    fault_point("resume")
    # The configs are compatible; this detects changes in the code of the model.
    check_parameters(point.path, point.manifest, engine.shapes)
    check_optimizer_states(point.path, point.manifest, engine.optimizer_states)
    # Another run may own the checkpoint (--resume PATH) and remove it.
    with reading(point.path):
        load_fragments(point.path, point.manifest, engine.fragments_to_load())
        engine.finish_loading(num_steps=point.state.step - point.state.skipped_steps)
        if point.has_memory_for(config):
            step.load_memory(load_memory(point.path, point.manifest, step.lanes))


def state_at(step: int, directory: CheckpointDirectory) -> TrainState:
    path = directory.at(step)
    return load_state(path, load_checkpoint_manifest(path))
