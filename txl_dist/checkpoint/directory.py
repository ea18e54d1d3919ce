"""Where the checkpoints of a run lie: RUN/checkpoints/step-NNNNNNNN, RUN/LATEST, RUN/BEST.

A checkpoint is there if its directory has its final name. Order comes from step numbers, never from
file times or from LATEST, which is a pointer for people and scripts.

    step-NNNNNNNN              a complete checkpoint
    superseded-step-NNNNNNNN   set aside when the run last went back behind it; kept for people
    .*.tmp                     being written or removed; what a killed process left, the next start
                               removes
"""

import logging
import re
import shutil
import uuid
from pathlib import Path

from data_pipeline.storage.atomic_files import fsync_directory, remove_leftovers, write_file
from txl_dist.checkpoint.manifest import MANIFEST_NAME
from txl_dist.errors import CheckpointError

_NAME = re.compile(r"step-(\d{8,})")
_SUPERSEDED = re.compile(r"superseded-step-\d{8,}")
ASIDE = ".saving.tmp"
"""Where a checkpoint is written before it is renamed; never read."""

log = logging.getLogger(__name__)


class CheckpointDirectory:
    """The checkpoints of one run. Only rank 0, under the lock of the run, changes them."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.path = run / "checkpoints"

    def at(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    @property
    def aside(self) -> Path:
        return self.path / ASIDE

    def steps(self) -> list[int]:
        """Steps of the checkpoints that have their final name, rising."""
        if not self.path.is_dir():
            return []
        matches = (_NAME.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def open(self) -> None:
        """Create the directory and remove what killed processes left; at the start of a run."""
        self.path.mkdir(parents=True, exist_ok=True)
        for pointer in ("LATEST", "BEST"):
            remove_leftovers(self.run / pointer)
        for step in self.steps():
            remove_leftovers(self.at(step) / MANIFEST_NAME)
        for leftover in self.path.glob(".*.tmp"):
            _remove_tree(leftover)

    def point(self, name: str, step: int) -> None:
        """Write RUN/LATEST or RUN/BEST."""
        write_file(self.run / name, f"checkpoints/{self.at(step).name}\n".encode())

    def begin(self) -> Path:
        """An empty directory to write the next checkpoint in.

        Raises CheckpointError if the run's directory is gone: a new one in its place would lack
        all that was written before.
        """
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path} is gone: the run directory was removed or renamed while the run was "
                "writing to it. Move it back"
            )
        if self.aside.exists():
            self._discard(self.aside)
        self.aside.mkdir()
        return self.aside

    def finish(self, step: int) -> Path:
        """Rename the directory that `begin` created to its final name, once all in it is synced."""
        fsync_directory(self.aside)
        final = self.at(step)
        # The same step saved again, by a run that fell back behind a damaged checkpoint.
        superseded = self._move_aside(final) if final.exists() else None
        self.aside.rename(final)
        fsync_directory(self.path)
        if superseded is not None:
            _remove_tree(superseded)
        return final

    def rewind(
        self, step: int, *, best_step: int | None = None, source: Path | None = None
    ) -> list[int]:
        """Set checkpoints of later steps aside, as a run goes on from `step`; returns their steps.

        They are of another past, or damaged. They stay on disk as `superseded-step-NNNNNNNN` until
        the run goes back again: then those of the time before are removed, so that at most the
        checkpoints of one abandoned stretch take up space. Nothing here reads them; to keep one,
        move it elsewhere. `source`, which the run goes on from, may be one of them and stays.
        LATEST and BEST then name checkpoints that remain, or are removed.
        """
        later = [found for found in self.steps() if found > step]
        if later:
            for entry in self.path.iterdir():
                if _SUPERSEDED.fullmatch(entry.name) and not (source and entry.samefile(source)):
                    self._discard(entry)
            for found in later:
                self.at(found).rename(self.path / f"superseded-{self.at(found).name}")
            fsync_directory(self.path)
        remaining = self.steps()
        self._point_or_remove("LATEST", remaining[-1] if remaining else None)
        self._point_or_remove("BEST", best_step if best_step in remaining else None)
        return later

    def prune(self, *, keep: int, best_step: int | None) -> None:
        """Remove all but the newest `keep` and the best. `rewind` left none of another past.

        One that cannot be removed is a warning: the checkpoint just written is what counts.
        """
        for step in self.steps()[:-keep]:
            if step != best_step:
                self._discard(self.at(step))

    def _point_or_remove(self, name: str, step: int | None) -> None:
        if step is None:
            (self.run / name).unlink(missing_ok=True)
        else:
            self.point(name, step)

    def _discard(self, path: Path) -> None:
        """Remove a directory; renamed first, so that a half-removed one is no checkpoint."""
        try:
            path = self._move_aside(path)
        except OSError as error:
            _warn_of_leftover(path, error)
        else:
            _remove_tree(path)

    def _move_aside(self, path: Path) -> Path:
        aside = self.path / f".{path.name.lstrip('.')}.{uuid.uuid4().hex[:8]}.tmp"
        return path.rename(aside)


def _remove_tree(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        _warn_of_leftover(path, error)


def _warn_of_leftover(path: Path, error: OSError) -> None:
    log.warning(
        "%s cannot be removed (%s); training goes on, and the next start tries again. Somebody may "
        "have it open, or its permissions have changed",
        path,
        error.strerror,
    )


def resume_advice(run: Path) -> str:
    """A sentence for the end of an error message: where the same command goes on from."""
    steps = CheckpointDirectory(run).steps()
    if not steps:
        return f"There is no checkpoint in {run}: the same command starts from the beginning"
    return f"The same command resumes from the newest checkpoint, that of step {steps[-1]}"


def divergence_advice(run: Path, *, before: int) -> str:
    """As `resume_advice`, once a number is not finite: the same command would meet it again.

    Names the newest checkpoints of steps below `before`; all were saved with finite numbers.
    """
    directory = CheckpointDirectory(run)
    good = [directory.at(step) for step in directory.steps() if step < before]
    if not good:
        return (
            "There is no good checkpoint to go back to: start again with a lower optimizer.lr or "
            "more optimizer.warmup_steps, in another directory=PATH"
        )
    advice = (
        f"The last good checkpoint is {good[-1].name}. Go on from it with a lower rate: txl train "
        f"CONFIG --resume {good[-1]} optimizer.lr=... --allow-change optimizer.lr"
    )
    if len(good) > 1:
        advice += f". If it diverges there too, go back further: --resume {good[-2]}"
    return advice


def resolve_checkpoint(path: str | Path) -> Path:
    """A checkpoint's directory from itself, a run directory, or a LATEST or BEST file.

    Raises CheckpointError naming what is there instead.
    """
    given = Path(path)
    if (given / MANIFEST_NAME).is_file():
        return given
    if given.is_file() and given.name in ("LATEST", "BEST"):
        name = given.read_text(errors="replace").strip().removeprefix("checkpoints/")
        if _NAME.fullmatch(name):
            return given.parent / "checkpoints" / name
        raise CheckpointError(
            f"{given} names no checkpoint ({name[:60]!r}). Give one directly; to list them: "
            f"txl checkpoint list {given.parent}"
        )
    directory = CheckpointDirectory(given)
    if steps := directory.steps():
        return directory.at(steps[-1])
    if not given.exists():
        raise CheckpointError(f"{given} does not exist; give a run directory or a checkpoint in it")
    raise CheckpointError(
        f"{given} holds no complete checkpoint. Give RUN/checkpoints/step-NNNNNNNN or a run "
        "directory with one; runs make them every training.checkpoint_interval_steps"
    )
