"""The checkpoints of a run: RUN/checkpoints/step-NNNNNNNN, RUN/LATEST, RUN/BEST.

A checkpoint is complete if its directory has its final name. Checkpoints are ordered by the step
numbers in their names, never by file times. LATEST and BEST are pointers for people and scripts;
`--resume auto` does not read them.

    step-NNNNNNNN              a complete checkpoint
    superseded-step-NNNNNNNN   from a later step than the run last resumed from; never read
    .*.tmp                     being written or removed; the next start removes what a killed
                               process has left
"""

import logging
import re
from pathlib import Path

from data_pipeline.storage.atomic_files import fsync_directory, remove_leftovers, write_file
from data_pipeline.storage.directories import publish_directory, remove_directory
from txl_dist.checkpoint.manifest import MANIFEST_NAME
from txl_dist.errors import CheckpointError

_NAME = re.compile(r"step-(\d{8,})")
_SUPERSEDED = re.compile(r"superseded-step-\d{8,}")
_STAGING = ".saving.tmp"

log = logging.getLogger(__name__)


class CheckpointDirectory:
    """The checkpoints of one run. Only rank 0 changes them, and only under the run's lock."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.path = run / "checkpoints"
        self.staging = self.path / _STAGING
        """Where the next checkpoint is written before it is renamed."""

    def at(self, step: int) -> Path:
        """Path of the checkpoint of a step."""
        return self.path / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in ascending order."""
        if not self.path.is_dir():
            return []
        # Not from LATEST, which a kill may have left one checkpoint behind.
        matches = (_NAME.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def newest_step(self) -> int | None:
        """Step of the newest complete checkpoint, if there is one."""
        return max(self.steps(), default=None)

    def open(self) -> None:
        """Create the directory and remove leftovers of killed processes; at the start of a run."""
        self.path.mkdir(parents=True, exist_ok=True)
        for pointer in ("LATEST", "BEST"):
            remove_leftovers(self.run / pointer)
        for step in self.steps():
            remove_leftovers(self.at(step) / MANIFEST_NAME)
        # The run's lock guarantees that no other process is writing these now.
        for leftover in self.path.glob(".*.tmp"):
            _remove(leftover)

    def set_pointer(self, name: str, step: int) -> None:
        """Write RUN/LATEST or RUN/BEST."""
        write_file(self.run / name, f"checkpoints/{self.at(step).name}\n".encode())

    def begin(self) -> Path:
        """An empty staging directory for the next checkpoint.

        Raises CheckpointError if the run directory has been removed. It is not created again,
        because the new one would lack the config, the metrics and all older checkpoints.
        """
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path} is gone: the run directory was removed or renamed during the run. "
                "Restore it"
            )
        if self.staging.exists():
            _remove(self.staging)
        self.staging.mkdir()
        return self.staging

    def finish(self, step: int) -> Path:
        """Rename the staging directory, whose files are synced, to the step's final name."""
        # The step exists already if the run had fallen back to before a damaged checkpoint.
        if replaced := publish_directory(self.staging, self.at(step)):
            _remove(replaced)
        return self.at(step)

    def rewind(
        self, step: int, *, best_step: int | None = None, source: Path | None = None
    ) -> list[int]:
        """Rename checkpoints of steps after `step`, from which a run resumes; returns those steps.

        They belong to the abandoned trajectory, or are damaged. They are kept as
        `superseded-step-NNNNNNNN` until the next rewind that renames any, so that the checkpoints
        of at most one abandoned trajectory take up space. `source`, the checkpoint to resume from,
        may be one of them and is not removed. LATEST and BEST are updated or removed.
        """
        later = [other for other in self.steps() if other > step]
        if later:
            for entry in self.path.iterdir():
                if _SUPERSEDED.fullmatch(entry.name) and not (source and entry.samefile(source)):
                    _remove(entry)
            for other in later:
                self.at(other).rename(self.path / f"superseded-{self.at(other).name}")
            fsync_directory(self.path)
        remaining = self.steps()
        self._point_or_remove("LATEST", remaining[-1] if remaining else None)
        self._point_or_remove("BEST", best_step if best_step in remaining else None)
        return later

    def prune(self, *, keep: int, best_step: int | None) -> None:
        """Remove all checkpoints except the newest `keep` and the best."""
        for step in self.steps()[:-keep]:
            if step != best_step:
                _remove(self.at(step))

    def _point_or_remove(self, name: str, step: int | None) -> None:
        if step is None:
            (self.run / name).unlink(missing_ok=True)
        else:
            self.set_pointer(name, step)


def _remove(path: Path) -> None:
    try:
        remove_directory(path)
    except OSError as error:  # no reason to stop training: the next start tries again
        log.warning(
            "%s cannot be removed (%s); training continues. A process may have a file open there, "
            "or permissions have changed",
            path,
            error.strerror,
        )


def resume_advice(run: Path) -> str:
    """A sentence for the end of an error message: where the same command resumes."""
    steps = CheckpointDirectory(run).steps()
    if not steps:
        return f"There is no checkpoint in {run}: the same command starts from the beginning"
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
    advice = (
        f"The last good checkpoint is {good[-1].name}. Resume from it with a lower learning rate: "
        f"txl train CONFIG --resume {good[-1]} optimizer.lr=... --allow-change optimizer.lr"
    )
    if len(good) > 1:
        advice += f". If it diverges there too, use an earlier one: --resume {good[-2]}"
    return advice


def resolve_checkpoint(path: str | Path) -> Path:
    """The directory of a checkpoint, given as itself, a run directory, or a LATEST or BEST file.

    Raises CheckpointError for any other `path`.
    """
    path = Path(path)
    if (path / MANIFEST_NAME).is_file():
        return path
    if path.is_file() and path.name in ("LATEST", "BEST"):
        name = path.read_text(errors="replace").strip().removeprefix("checkpoints/")
        if _NAME.fullmatch(name):
            return path.parent / "checkpoints" / name
        raise CheckpointError(
            f"{path} names no checkpoint ({name[:60]!r}). Give one directly; to list them: "
            f"txl checkpoint list {path.parent}"
        )
    directory = CheckpointDirectory(path)
    if steps := directory.steps():
        return directory.at(steps[-1])
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a run directory or a checkpoint in it")
    raise CheckpointError(
        f"{path} contains no complete checkpoint. Give RUN/checkpoints/step-NNNNNNNN, or a run "
        "directory with one; runs write them every training.checkpoint_interval_steps"
    )
