"""Where the checkpoints of a run lie: RUN/checkpoints/step-NNNNNNNN, RUN/LATEST, RUN/BEST.

A checkpoint is there if its directory has its final name. Order comes from step numbers, never from
file times or from LATEST, which is a pointer for people and scripts.
"""

import re
import shutil
from pathlib import Path

from data_pipeline.atomic_files import fsync_directory, write_file
from txl_dist.checkpoint.manifest import MANIFEST_NAME
from txl_dist.errors import CheckpointError

_NAME = re.compile(r"step-(\d{8,})")
ASIDE = ".saving.tmp"
"""Where a checkpoint is written before it is renamed; never read."""


class CheckpointDirectory:
    """The checkpoints of one run."""

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

    def point(self, name: str, step: int) -> None:
        """Write RUN/LATEST or RUN/BEST."""
        write_file(self.run / name, f"checkpoints/{self.at(step).name}\n".encode())

    def begin(self) -> Path:
        """An empty directory to write the next checkpoint in; removes what a kill left."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.aside.exists():
            shutil.rmtree(self.aside)
        self.aside.mkdir()
        return self.aside

    def finish(self, step: int) -> Path:
        """Give what `begin` opened its final name. Everything inside is on disk already."""
        fsync_directory(self.aside)
        final = self.at(step)
        if final.exists():
            # The same step saved again, by a run that fell back behind a damaged checkpoint.
            superseded = self.path / f".superseded-{final.name}.tmp"
            shutil.rmtree(superseded, ignore_errors=True)
            final.rename(superseded)
            self.aside.rename(final)
            shutil.rmtree(superseded)
        else:
            self.aside.rename(final)
        fsync_directory(self.path)
        return final

    def rewind(self, step: int) -> list[int]:
        """Take checkpoints of later steps out of the way, as a run goes on from `step`.

        They are of another past, or damaged; they stay on disk as `superseded-step-NNNNNNNN`, and
        nothing here looks at them again. Returns their steps.
        """
        later = [found for found in self.steps() if found > step]
        for found in later:
            aside = self.path / f"superseded-{self.at(found).name}"
            shutil.rmtree(aside, ignore_errors=True)
            self.at(found).rename(aside)
        if later:
            fsync_directory(self.path)
            if self.at(step).exists():
                self.point("LATEST", step)
            else:
                (self.run / "LATEST").unlink(missing_ok=True)
        return later

    def prune(self, *, keep: int, best_step: int | None) -> None:
        """Remove all but the newest `keep` and the best. `rewind` left none of another past."""
        steps = self.steps()
        for step in steps[:-keep]:
            if step != best_step:
                shutil.rmtree(self.at(step))


def resume_advice(run: Path) -> str:
    """A sentence that says what the same command would do next in run directory `run`."""
    steps = CheckpointDirectory(run).steps()
    if not steps:
        return "There is no checkpoint yet: the same command starts the run anew"
    return f"The same command resumes from the checkpoint at step {steps[-1]}"


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
