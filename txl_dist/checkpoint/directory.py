"""The checkpoints of a run: RUN/checkpoints/step-NNNNNNNN, RUN/LATEST, RUN/BEST.

A checkpoint is complete if its directory has its final name. Checkpoints are ordered by the step
numbers in their names, never by file times. LATEST and BEST are pointers for people and scripts. A
resume only asks whether LATEST exists, if there is no checkpoint: then they are missing.

    step-NNNNNNNN              a complete checkpoint
    superseded-step-NNNNNNNN   of steps that were undone; a resume never chooses it
    .*.tmp                     being written or removed; the next start removes what a killed
                               process has left

A process that reads a checkpoint holds a shared lock of its directory (`reading`); a checkpoint
that is locked is not removed.
"""

import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.system.files import (
    fsync_directory,
    open_descriptor,
    publish_directory,
    remove_directory,
    remove_leftovers,
    sha256_file,
    try_lock,
    write_file,
)
from data_pipeline.system.path_kind import PathKind, kind_of
from data_pipeline.system.sources import is_read_failure
from txl_dist.checkpoint.attempts import Attempt
from txl_dist.checkpoint.manifest import (
    MANIFEST_NAME,
    CheckpointManifest,
    load_checkpoint_manifest,
    newest_manifest,
    part_name,
    unread,
)
from txl_dist.errors import CheckpointError, FencedError

_NAME = re.compile(r"step-(\d{8,})")
POINTERS = ("LATEST", "BEST")
_SUPERSEDED = re.compile(r"superseded-step-\d{8,}(-\d+)?")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Which checkpoints a run keeps, in its directory and at its URL."""

    keep: int
    """How many of the newest."""
    keep_interval_steps: int | None = None
    """Also the steps that are multiples of this."""

    def removed(self, steps: Sequence[int], *, kept: Collection[int | None] = ()) -> list[int]:
        """Those of `steps`, in ascending order, that are not kept, nor in `kept`."""
        multiple = self.keep_interval_steps
        return [
            step
            for step in steps[: -self.keep]
            if step not in kept and not (multiple and step % multiple == 0)
        ]


class CheckpointDirectory:
    """The checkpoints of one run.

    Every rank writes into a staging directory (`begin`). Complete checkpoints and the pointers are
    changed only by rank 0 of the newest attempt, under the lock of the run directory.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.path = run / "checkpoints"
        self.attempt: Attempt | None = None
        """Set in a training process: changes raise FencedError once there is a newer attempt."""

    def require_newest_attempt(self) -> None:
        """Raise FencedError if a newer attempt of the run has started; called before a change."""
        if self.attempt is not None:
            self.attempt.require_newest()

    def staging(self, save_id: str) -> Path:
        """Where the files of one save are written before the directory is renamed."""
        # A name per save: a rank that outlives its run cannot write into the save of another run.
        return self.path / f".saving-{save_id}.tmp"

    def at(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in ascending order."""
        # Not from LATEST, which a kill may have left one checkpoint behind.
        matches = ((_NAME.fullmatch(path.name), path) for path in self._entries())
        return sorted(int(match[1]) for match, path in matches if match and path.is_dir())

    def _entries(self) -> list[Path]:
        # Any other error is raised: a directory that cannot be listed is not an empty one.
        try:
            return list(self.path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def superseded(self) -> list[Path]:
        """The checkpoints of steps that a resume or a rollback has undone (`rewind`)."""
        return [path for path in self._entries() if _SUPERSEDED.fullmatch(path.name)]

    def newest_step(self) -> int | None:
        return max(self.steps(), default=None)

    def newest_manifest(self) -> CheckpointManifest | None:
        """The manifest of the newest checkpoint that has a readable one; None without one."""
        with suppress(CheckpointError):
            return newest_manifest([self.at(step) for step in self.steps()])
        return None

    def open(self) -> None:
        """Create the directory and remove leftovers of killed processes; at the start of a run."""
        self.require_newest_attempt()
        self.path.mkdir(parents=True, exist_ok=True)
        for pointer in POINTERS:
            remove_leftovers(self.run / pointer)
        for step in self.steps():
            remove_leftovers(self.at(step) / MANIFEST_NAME)
        # The run's lock guarantees that no other process is writing these now.
        for leftover in self.path.glob(".*.tmp"):
            _remove(leftover)

    def set_pointer(self, name: str, step: int) -> None:
        self.require_newest_attempt()
        write_file(self.run / name, f"checkpoints/{self.at(step).name}\n".encode())

    def pointer(self, name: str) -> int | None:
        """The step that RUN/LATEST or RUN/BEST names; None without one, or if it is damaged."""
        with suppress(OSError):
            return self.read_pointer(name)
        return None

    def read_pointer(self, name: str) -> int | None:
        """`pointer`; raises OSError if it is there and cannot be read now."""
        try:
            text = (self.run / name).read_text(errors="replace").strip()
        except OSError as error:
            if is_read_failure(error):
                raise
            return None
        match = _NAME.fullmatch(text.removeprefix("checkpoints/"))
        return int(match[1]) if match else None

    def begin(self, save_id: str) -> Path:
        """The staging directory of a save; every rank calls this.

        Raises CheckpointError if the run directory has been removed. It is not created again,
        because the new one would lack the config, the metrics and all older checkpoints.
        """
        staging = self.staging(save_id)
        try:
            staging.mkdir(exist_ok=True)
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.path} is gone: the run directory was removed or renamed during the run. "
                "Restore it"
            ) from None
        return staging

    def finish(self, save_id: str, step: int) -> Path:
        """Rename the staging directory, whose files are synced, to the step's final name."""
        self.require_newest_attempt()
        # The step exists already if the run had fallen back to before a damaged checkpoint.
        replaced = publish_directory(self.staging(save_id), self.at(step))
        try:
            self.require_newest_attempt()
        except FencedError:  # this process was suspended between the check and the rename
            # Another process may have published this step since.
            if load_checkpoint_manifest(self.at(step)).save_id == save_id:
                _remove(self.at(step))
                if replaced:
                    replaced.rename(self.at(step))
            raise
        if replaced:
            _remove(replaced)
        return self.at(step)

    def update_state(self, step: int, changes: Mapping[str, Any]) -> None:
        """Replace entries of `state` in the manifest of a step's checkpoint."""
        self.require_newest_attempt()
        manifest = load_checkpoint_manifest(self.at(step))
        updated = manifest.model_copy(update={"state": {**manifest.state, **changes}})
        write_file(self.at(step) / MANIFEST_NAME, updated.to_json())

    def is_publishing(self, num_ranks: int) -> bool:
        """Whether a save has the parts of all ranks, and only needs rank 0 to complete it."""
        parts = [part_name(rank) for rank in range(num_ranks)]
        return any(
            (staging / MANIFEST_NAME).exists() or all((staging / part).exists() for part in parts)
            for staging in self.path.glob(self.staging("*").name)
        )

    def remove_staging(self, save_id: str) -> None:
        """Remove the files of a save that has failed, as far as possible."""
        shutil.rmtree(self.staging(save_id), ignore_errors=True)

    def rewind(self, step: int, *, best_step: int | None = None) -> list[int]:
        """Supersede the checkpoints of steps after `step`, where the run continues; returns those.

        They precede a rollback, or are damaged. They are kept as `superseded-step-NNNNNNNN` until
        the next rewind that renames any, so that those of at most one rewind take up space. LATEST
        and BEST are updated or removed.
        """
        self.require_newest_attempt()
        later = [other for other in self.steps() if other > step]
        if later:
            for entry in self.superseded():
                _remove(entry)
            for other in later:
                self.at(other).rename(self.path / f"superseded-{self.at(other).name}")
            fsync_directory(self.path)
        remaining = self.steps()
        best = best_step if best_step in remaining else None
        for name, pointed in zip(POINTERS, (max(remaining, default=None), best), strict=True):
            if pointed is None:
                (self.run / name).unlink(missing_ok=True)
            else:
                self.set_pointer(name, pointed)
        return later

    def prune(self, retention: Retention, *, best_step: int | None) -> None:
        """Remove the checkpoints that are not kept, except the best, and those being read.

        A checkpoint that is being read is removed by a later call.
        """
        self.require_newest_attempt()
        for step in retention.removed(self.steps(), kept={best_step}):
            _remove_unless_read(self.at(step))


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Prevent the removal of a checkpoint while it is read.

    Raises CheckpointError if it is being removed now. Without effect on file systems without locks
    of directories, such as NFS: there, a read of a removed file fails with an error that names it.
    """
    try:
        descriptor = os.open(checkpoint, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if is_read_failure(error):
            raise unread(checkpoint, error) from error
        raise CheckpointError(
            f"{checkpoint} cannot be read ({error.strerror}). A run removes old checkpoints. "
            f"To list the present ones: txl checkpoint list {checkpoint.parent.parent}"
        ) from None
    try:
        if not try_lock(descriptor, shared=True):
            raise CheckpointError(
                f"{checkpoint} is being removed by its run. Choose a newer one: "
                f"txl checkpoint list {checkpoint.parent.parent}"
            )
        yield
    finally:
        os.close(descriptor)


def find_damage(checkpoint: Path, manifest: CheckpointManifest, names: Iterable[str]) -> list[str]:
    """One message per damaged file among the named files of a checkpoint.

    Raises StoreError if one cannot be read: that says nothing about the checkpoint.
    """
    damage = []
    for name in names:
        entry, path = manifest.files[name], checkpoint / name
        try:
            # The size first: it finds a truncated file without reading it.
            if (size := path.stat().st_size) != entry.bytes:
                damage.append(f"{path} has {size:,} bytes, expected {entry.bytes:,}")
            elif (digest := sha256_file(path)) != entry.sha256:
                damage.append(f"{path} has sha256 {digest}, expected {entry.sha256}")
        except FileNotFoundError:
            damage.append(f"{path} is missing")
        except OSError as error:
            raise unread(path, error) from error
    return damage


def _remove_unless_read(path: Path) -> None:
    with suppress(OSError), open_descriptor(path) as descriptor:
        if try_lock(descriptor):
            _remove(path)
        else:
            log.info("%s is being read, so it is removed later", path)
        return
    _remove(path)  # it cannot be opened, and this says why


def _remove(path: Path) -> None:
    try:
        remove_directory(path)
    except OSError as error:  # no reason to stop training: the next start tries again
        log.warning(
            f"{path} cannot be removed ({error.strerror}); training continues. A process may have "
            "a file open there, or permissions have changed"
        )


def resume_advice(run: Path) -> str:
    """A sentence for the end of an error message: where the same command resumes."""
    try:
        steps = CheckpointDirectory(run).steps()
    except OSError as error:
        return f"The checkpoints of {run} cannot be listed now ({error.strerror})"
    if not steps:
        return f"There is no checkpoint in {run} yet: the same command starts as before"
    return f"The same command resumes from the newest checkpoint, that of step {steps[-1]}"


def divergence_advice(run: Path, *, before: int) -> str:
    """Like `resume_advice`, after a number that is not finite: the command has to change.

    Names the newest checkpoints of steps below `before`, which contain only finite numbers.
    """
    directory = CheckpointDirectory(run)
    good = [directory.at(step) for step in directory.steps() if step < before]
    if not good:
        return (
            "There is no good checkpoint: start again in another directory=PATH with a lower "
            "optimizer.lr or more optimizer.warmup_steps"
        )
    return (
        f"The last good checkpoint is {good[-1].name}. Fork the run there with a lower learning "
        f"rate: txl train CONFIG directory=NEW --resume {good[-1]} optimizer.lr=... --allow-change "
        "optimizer.lr. If it diverges there too, use an earlier checkpoint"
    )


def run_of(checkpoint: Path) -> Path | None:
    """The run directory of a checkpoint in it; None for other models."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None


def model_name(checkpoint: Path) -> str:
    """RUN/step-NNNNNNNN for a checkpoint of a run, else the name of the directory."""
    run = run_of(checkpoint)
    return checkpoint.name if run is None else f"{run.name}/{checkpoint.name}"


def resolve_checkpoint(path: str | Path) -> Path:
    """The directory of a checkpoint, given as itself, a run directory, its checkpoints directory,
    or a LATEST or BEST file.

    Raises CheckpointError for any other `path`.
    """
    path = Path(path)
    if (path / MANIFEST_NAME).is_file():
        return path
    is_pointer = path.is_file() and path.name in POINTERS
    kind = kind_of(path)
    is_inside = is_pointer or (path.name == "checkpoints" and kind is not PathKind.RUN)
    directory = CheckpointDirectory(path.parent if is_inside else path)
    step = directory.pointer(path.name) if is_pointer else directory.newest_step()
    if step is not None:
        return directory.at(step)
    if is_pointer:
        raise CheckpointError(
            f"{path} names no checkpoint. Give one directly; to list them: "
            f"txl checkpoint list {path.parent}"
        )
    found = f"is {kind} and contains no complete checkpoint"
    raise CheckpointError(
        f"{path} {'does not exist' if kind is PathKind.MISSING else found}. Give "
        "RUN/checkpoints/step-NNNNNNNN, or a run directory with one; runs write them every "
        "training.checkpoint_interval_steps"
    )
