"""Where a run resumes. `Resume.find` is the only place that decides it, by this table.

    --resume  checkpoints of the run          what happens
    never     none                            a new run
    never     some                            refused; at a restart by the same launch: as `auto`
    PATH      none                            a fork: a new run that begins at PATH
    PATH      none, but RUN/LATEST exists     refused: they were moved, or are not mounted
    PATH      of a fork that began at PATH    as `auto`: a scheduler repeats its command
    PATH      others                          refused: a fork needs a new directory
    auto      none                            a new run
    auto      none, but RUN/LATEST exists     refused: they were moved, or are not mounted
    auto      the newest is intact            the run resumes from it
    auto      the newest is damaged           from its copy at the URL, if that is intact; else from
                                              the one before it, and the lost steps are logged; with
                                              --strict: refused
    auto      all are damaged                 refused
    any       newer ones named step-N.ID      refused: copied from a URL, they have to be renamed
    any       of another run, as copies       refused; nothing in the run directory is changed
    any       the URL does not respond        refused; at a restart by the same launch: those in
                                              the run directory are used

The checkpoints of a run are those in RUN/checkpoints and, with `training.checkpoint_url`, their
copies: the newest intact copy is downloaded first if it is newer than the intact checkpoints in the
run directory. Superseded and unfinished checkpoints never count.

Then settings and data are compared: some may differ, some need `--allow-change`, the others are
refused (`compatibility.py`). Only after that the attempt begins, which stops older attempts of the
run (`spec.py`). A rollback has another rule (recovery.py).

The table is also in docs/how_to/train_for_weeks.md; decision 50 has the reasons.
"""

import logging
import uuid
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from data_pipeline.errors import counted
from data_pipeline.system.remote_path import RemotePath
from txl_dist.checkpoint.attempts import FOLDER, newest_record
from txl_dist.checkpoint.copies import (
    CheckpointCopies,
    copy_name,
    names_of,
    newest_local_copy,
    step_of,
)
from txl_dist.checkpoint.directory import (
    CheckpointDirectory,
    find_damage,
    reading,
    resolve_checkpoint,
)
from txl_dist.checkpoint.manifest import CheckpointManifest, load_checkpoint_manifest
from txl_dist.errors import CheckpointError, ConfigError, StoreError
from txl_dist.runtime.process import code_description
from txl_dist.runtime.world import World, do_on_rank_zero
from txl_dist.training.compatibility import require_compatible
from txl_dist.training.data import TrainingData
from txl_dist.training.spec import TrainSpec
from txl_dist.training.state import TrainState, load_state

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A verified checkpoint that this spec may resume from."""

    path: Path
    manifest: CheckpointManifest
    state: TrainState
    is_fork: bool = False
    """Whether it is a checkpoint of another run, where this one begins (`--resume PATH`)."""


def run_id_of(point: ResumePoint | None) -> str:
    """The id of the run that a checkpoint belongs to; a new one for a new run or a fork."""
    return uuid.uuid4().hex if point is None or point.is_fork else point.manifest.run_id


def newest_intact(
    directory: CheckpointDirectory, world: World, *, before: int | None = None
) -> tuple[ResumePoint | None, list[str]]:
    """Find the newest checkpoint without damage, of an earlier step than `before` if that is given.

    Returns None without one, and the damage of those that are newer, which is also logged. Raises
    StoreError if one cannot be read. Collective.
    """
    damage: list[str] = []
    # From rank 0: on a network file system the ranks may see different directory listings.
    for step in reversed(world.broadcast(directory.steps())):
        if before is None or step < before:
            try:
                return verify_point(directory.at(step), world), damage
            except StoreError:  # it may be intact, and its steps must not be lost
                raise
            except CheckpointError as error:
                log.warning("%s", error)
                damage.append(str(error))
    return None, damage


def verify_point(path: Path, world: World) -> ResumePoint:
    """Hash all files, each rank a part of them; every rank raises the same error."""
    points: list[ResumePoint] = []

    def problems() -> list[str]:
        try:
            with reading(path):
                manifest = load_checkpoint_manifest(path)
                points.append(ResumePoint(path, manifest, load_state(path, manifest)))
                # Each rank hashes 1/num_ranks of the files, not only those that it will read.
                names = sorted(manifest.files)[world.rank :: world.num_ranks]
                return find_damage(path, manifest, names)
        except StoreError:
            raise
        except CheckpointError as error:
            return [str(error)]

    if damage := sorted({text for texts in world.run_on_all(problems) for text in texts}):
        raise CheckpointError(f"{path} is damaged: {'; '.join(damage)}")
    return points[0]


def check_resume(spec: TrainSpec, data: TrainingData) -> None:
    """Before the ranks are started: raise what `Resume.find` would raise, except for damage.

    Copies at a URL are left to the ranks, which download them.
    """
    directory = CheckpointDirectory(spec.run_path)
    if spec.config.training.checkpoint_url is None or directory.steps():
        source = Resume(spec, data, World(0, 1), directory).source(download=False)
        if isinstance(source, Path):
            manifest = load_checkpoint_manifest(source)
            state = load_state(source, manifest)
            require_compatible(manifest, state, source, spec=spec, data=data)


@dataclass(frozen=True)
class Resume:
    """The choice of a checkpoint, for one spec."""

    spec: TrainSpec
    data: TrainingData
    world: World
    directory: CheckpointDirectory

    def find(self, *, download: bool = True) -> ResumePoint | None:
        """The verified checkpoint to resume from, or None for a new run. Collective.

        `download`: whether copies count that are newer than the checkpoints in the run directory.
        Raises ConfigError, CheckpointError, DataError or StoreError where the table says "refused".
        """
        source = do_on_rank_zero(
            self.world,
            lambda: self.source(download=download),
            name="the choice or download of a checkpoint",
        )
        if source == "new run":
            return None
        if isinstance(source, Path):
            point = verify_point(source, self.world)
            # The events of the other run do not count any more.
            divergence = point.state.divergence.model_copy(update={"event_steps": ()})
            update = {"forked_from": self._given_path, "divergence": divergence}
            point = replace(point, state=point.state.model_copy(update=update), is_fork=True)
        else:
            point = self._newest_intact(download=download)
        require_compatible(point.manifest, point.state, point.path, spec=self.spec, data=self.data)
        # A warning, not an error: most changes of the code do not change losses.
        if point.manifest.written_by != (current := code_description()):
            log.warning(
                f"{point.path} was written by {point.manifest.written_by}, this is {current}: the "
                "losses may differ from those of an uninterrupted run"
            )
        return point

    def source(self, *, download: bool) -> Literal["new run", "own checkpoints"] | Path:
        """The row of the table, except for damage; a path begins a fork. On rank 0; downloads."""
        spec, directory = self.spec, self.directory
        if not self._is_restart and (steps := directory.steps()):
            self._require_resumable(steps[-1])
        if download:
            self.download_newest(newer_than=directory.newest_step())
        self._require_renamed_copies()
        if directory.steps():
            return "own checkpoints"
        latest = directory.run / "LATEST"
        if latest.exists() and spec.resume != "never":
            raise CheckpointError(
                f"{latest} says that this run has checkpoints, but {directory.path} has none: they "
                "were moved or removed, or their storage is not mounted. Bring them back and run "
                f"the same command again. To lose that run and begin again: rm {latest}"
            )
        return "new run" if spec.resume in ("auto", "never") else resolve_checkpoint(spec.resume)

    def _require_renamed_copies(self) -> None:
        """Raise CheckpointError if a copy from a URL is newer than the checkpoints of the run."""
        copy = newest_local_copy(self.directory)
        if copy is None or step_of(copy.name) <= (self.directory.newest_step() or 0):
            return
        raise CheckpointError(
            f"{copy} is a copy from a URL, and newer than the checkpoints of this run. To resume "
            f"from copies, rename them from step-N.ID to step-N (this one to {copy.stem}); to "
            "resume without them, move them to another place. Then run the same command again"
        )

    def _require_resumable(self, step: int) -> None:
        """Raise ConfigError if the command must not continue the run in its directory."""
        resume, run = self.spec.resume, self.directory.run
        if resume == "auto":
            return
        if resume == "never":
            raise ConfigError(
                f"{run} holds a run up to step {step}, and --resume never would overwrite it. "
                "Choose another directory=PATH, move that run to another place, or resume it with "
                "--resume auto"
            )
        manifest = self.directory.newest_manifest()
        begin = manifest.state.get("forked_from") if manifest else self._given_path
        if begin != self._given_path:
            origin = f"which began at {begin}" if begin else "which is no fork"
            raise ConfigError(
                f"{run} holds a run up to step {step}, {origin}; --resume {resume} begins another "
                "run. Give the fork a new directory: txl train CONFIG directory=NEW --resume "
                f"{resume}. To continue the run in {run}, leave --resume out"
            )

    @cached_property
    def _is_restart(self) -> bool:
        """Whether this launch has begun an attempt before, and no other launch has since.

        As it was at the first `find`: then this start has not begun one yet.
        """
        folder = self.directory.run / FOLDER
        return newest_record(folder, launch_id=self.spec.launch_id) is not None

    @property
    def _given_path(self) -> str:
        """PATH of `--resume PATH`, as it is stored in the checkpoints of the fork."""
        # Links are not followed: their targets may differ from host to host, or change.
        return str(Path(self.spec.resume).absolute())

    def _newest_intact(self, *, download: bool) -> ResumePoint:
        """The newest checkpoint without damage, which may be older than the newest. Collective."""
        run = self.directory.run
        point, damage = newest_intact(self.directory, self.world)
        if damage and download:  # the copy of a damaged checkpoint may be intact
            step = point.state.step if point else None
            do_on_rank_zero(
                self.world,
                lambda: self.download_newest(newer_than=step),
                name="the download of a checkpoint",
            )
            point, damage = newest_intact(self.directory, self.world)
        if point is None:
            raise CheckpointError(
                f"all checkpoints of {run} are damaged: {'; '.join(damage)}. Restore one from a "
                "backup, or start a new run in another directory"
            )
        if damage and self.spec.strict:
            raise CheckpointError(
                f"{damage[0]}. Restore it from a backup; without --strict the run resumes from the "
                f"newest intact checkpoint before it (txl checkpoint list {run})"
            )
        if damage and self.world.is_rank_zero:
            num_lost = self.directory.steps()[-1] - point.state.step
            log.warning(
                f"Resuming from step {point.state.step} instead; {counted(num_lost, 'step')} "
                f"{'is' if num_lost == 1 else 'are'} lost and will be trained again"
            )
        return point

    # --- copies at `training.checkpoint_url`: on rank 0 -----------------------------------------

    def download_newest(self, *, newer_than: int | None) -> None:
        """Download the newest intact copy of a step after `newer_than`, if there is any.

        It replaces a checkpoint of its step. Raises ConfigError, CheckpointError, DataError or
        StoreError if the copies are of another run, do not fit the spec, are all damaged, or cannot
        be read; then nothing was changed.
        """
        directory, url = self.directory, self.spec.config.training.checkpoint_url
        if url is None:
            return
        copies = CheckpointCopies(RemotePath(url))
        try:
            names = self._usable(copies)
        except OSError as error:
            if not self._is_restart:
                raise copies.unreachable(error) from error
            log.warning("%s does not respond; this launch has its checkpoints locally", copies.url)
            return
        directory.path.mkdir(parents=True, exist_ok=True)
        damage: list[str] = []
        for name in reversed(names):
            if newer_than is not None and step_of(name) <= newer_than:
                return
            try:
                path = copies.download(name, directory)
            except StoreError:  # the disk here: this says nothing about the copy
                raise
            except CheckpointError as error:
                if self.spec.strict:
                    raise
                damage.append(str(error))
                log.warning("%s. An older checkpoint is used instead", error)
                continue
            except OSError as error:  # storage or disk fails: this says nothing about the copy
                raise StoreError(
                    f"{copies.at(name)} cannot be downloaded to {directory.path}: "
                    f"{error.strerror or error}. Run it again, or train without the copies: "
                    "training.checkpoint_url=null"
                ) from error
            log.info("downloaded %s from %s", path, copies.at(name))
            return
        if damage and newer_than is None:  # a new run would replace them
            raise copies.all_damaged("; ".join(damage))

    def _usable(self, copies: CheckpointCopies) -> list[str]:
        """The copies from which this command may resume, oldest first; none of another fork.

        Raises OSError if the URL cannot be read.
        """
        directory, resume, names = self.directory, self.spec.resume, copies.complete()
        if not names:
            return []
        if resume == "never" and not self._is_restart:
            raise ConfigError(
                f"training.checkpoint_url={copies.url} holds a run up to step "
                f"{step_of(names[-1])}, and --resume never would overwrite it. Choose another URL, "
                "or resume that run with --resume auto"
            )
        manifest = copies.newest_manifest(names)
        path = copies.at(copy_name(manifest))
        state = load_state(path, manifest)
        if resume not in ("auto", "never") and state.forked_from != self._given_path:
            return []  # the attempt of another run is refused at this URL (`begin_attempt`)
        if own := directory.newest_manifest():
            copies.require_run(own.run_id)
        elif not directory.steps():
            require_compatible(manifest, state, path, spec=self.spec, data=self.data)
        # A kill or an outage may have prevented a rollback from removing the copies it superseded.
        superseded = names_of(directory.superseded())
        return [name for name in names if name not in superseded]
