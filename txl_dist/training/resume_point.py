"""ResumePoint: a checkpoint from which a run resumes, verified completely before it is used."""

import logging
import uuid
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
    is_fork: bool = False
    """Whether it is a checkpoint of another run, where this one begins (`--resume PATH`)."""

    @property
    def kept_step(self) -> int:
        """The last step in the run directory that stays part of the run; 0 for a fork."""
        return 0 if self.is_fork else self.state.step

    def has_memory_for(self, config: RunConfig) -> bool:
        """Whether its memory fits: the same lanes, and rows that can be loaded."""
        return len(self.manifest.rank_of_lane) == config.data.num_lanes and memory_kind(
            config.model
        ).fits(self.manifest.architecture)


def run_id_of(point: ResumePoint | None) -> str:
    """The id of the run that a checkpoint belongs to; a new one for a new run or a fork."""
    return uuid.uuid4().hex if point is None or point.is_fork else point.manifest.run_id


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


def restore(point: ResumePoint, config: RunConfig, engine: Engine, step: TrainStep) -> None:
    """Load weights, optimizer state and, if it fits, the memory of this rank's lanes."""
    fault_point("resume")
    # The configs are compatible; this detects changes in the code of the model.
    check_parameters(point.path, point.manifest, engine.shapes)
    check_optimizer_states(point.path, point.manifest, engine.optimizer_states)
    # At a fork, the other run may remove the checkpoint.
    with reading(point.path):
        load_fragments(point.path, point.manifest, engine.fragments_to_load())
        engine.finish_loading(num_steps=point.state.step - point.state.skipped_steps)
        if point.has_memory_for(config):
            step.load_memory(load_memory(point.path, point.manifest, step.lanes))
