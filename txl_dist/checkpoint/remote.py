"""The copies of a run's checkpoints below a URL: names, download, removal.

    URL/checkpoints/step-NNNNNNNN.ID/   the files of one save; complete if manifest.json is there
    URL/LATEST                          for people and scripts
    URL/attempts/                       the starts of the run; see `attempts.py`
    URL/metrics.jsonl, tracking.json, goodput.json
                                        of the run directory, at least up to the newest checkpoint

The name contains the id of the save: an upload that was interrupted can never be completed with the
files of another save of the same step. `mirror.py` uploads.
"""

import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from data_pipeline.system.files import write_file, write_synced
from data_pipeline.system.remote_path import RemotePath
from txl_dist.checkpoint.attempts import FOLDER
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import (
    MANIFEST_NAME,
    CheckpointManifest,
    FileEntry,
    load_checkpoint_manifest,
)
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.tracking.state import STATE, TrackingState

RUN_FILES = ("metrics.jsonl", STATE, "goodput.json")
"""Files of the run directory that are copied: the metrics, which MLflow run has them, and how the
time was spent."""
_NAME = re.compile(r"step-(\d{8,})\.[0-9a-f]{8,64}")
_BLOCK_BYTES = 8 * 2**20

log = logging.getLogger(__name__)


def remote_name(manifest: CheckpointManifest) -> str | None:
    """Name of the copy of a checkpoint; None if it was written before saves had ids."""
    return f"step-{manifest.step:08d}.{manifest.save_id}" if manifest.save_id else None


def abandoned_names(checkpoints: CheckpointDirectory) -> set[str]:
    """Names of the copies of superseded checkpoints, from which no run may resume by itself."""
    return names_of(checkpoints.superseded())


def local_names(checkpoints: CheckpointDirectory) -> set[str]:
    """Names of the copies of the run's checkpoints."""
    return names_of([checkpoints.at(step) for step in checkpoints.steps()])


def names_of(paths: Iterable[Path]) -> set[str]:
    """Names of the copies of checkpoints, of those with a readable manifest."""
    names = set()
    for path in paths:
        with suppress(CheckpointError):  # damaged or removed: its copy cannot be identified
            names.add(remote_name(load_checkpoint_manifest(path)))
    return {name for name in names if name}


@dataclass(frozen=True, slots=True)
class RemoteCheckpoints:
    """The copies below `url`. Methods raise OSError if the store fails, after retries."""

    url: RemotePath

    @property
    def attempts(self) -> RemotePath:
        """The folder of attempts (`attempts.py`)."""
        return self.url / FOLDER

    def at(self, name: str) -> RemotePath:
        """The folder of one copy."""
        return self.url / "checkpoints" / name

    def names(self) -> list[str]:
        """Names of all copies, complete or not, in ascending order of steps."""
        names = [name for name in (self.url / "checkpoints").folders() if _NAME.fullmatch(name)]
        return sorted(names, key=step_of)

    def complete(self) -> list[str]:
        """Names of the complete copies, in ascending order of steps."""
        names = [name for name in self.names() if (self.at(name) / MANIFEST_NAME).is_file()]
        try:
            latest = (self.url / "LATEST").read_bytes().decode(errors="replace").strip()
        except FileNotFoundError:
            latest = ""
        # Two of one step are left by a kill after a step was trained again: LATEST is the new one.
        return sorted(names, key=lambda name: (step_of(name), latest.endswith(name)))

    def remove(self, name: str) -> None:
        """Remove a copy, its manifest first, so that it never looks complete."""
        (self.at(name) / MANIFEST_NAME).remove()
        self.at(name).remove()

    def newest_manifest(self, names: Sequence[str]) -> tuple[str, CheckpointManifest]:
        """The last of `names` whose manifest is readable, and this manifest.

        Raises CheckpointError if there is none.
        """
        problems = []
        for name in reversed(names):
            try:
                with tempfile.TemporaryDirectory() as folder:
                    return name, self._download_manifest(name, Path(folder))
            except CheckpointError as error:
                problems.append(str(error))
        raise all_damaged(self, problems)

    def require_run(self, run_id: str) -> None:
        """Raise ConfigError if the copies are those of another run, which would remove them.

        Raises CheckpointError if no manifest says which run that is.
        """
        if not (names := self.complete()):
            return
        name, manifest = self.newest_manifest(names)
        if manifest.run_id not in (run_id, None):
            raise ConfigError(
                f"training.checkpoint_url={self.url} has checkpoints of another run "
                f"({name}). Use another URL for this run, or remove them with the tools of the "
                "store"
            )

    def download(self, name: str, checkpoints: CheckpointDirectory) -> Path:
        """Copy a complete checkpoint, the best one up to its step, and the files of the run to the
        run's directory; returns the path of the first.

        Each file is verified before the checkpoint gets its final name. Raises CheckpointError for
        a damaged copy. A damaged copy of the best one is logged.
        """
        save_id = name.partition(".")[2]
        staging = checkpoints.begin(save_id)
        try:
            manifest = self._download_files(name, staging)
            # First: once the newer checkpoint is there, the next start downloads nothing.
            self._download_run_files(checkpoints.run)
            self._download_best(manifest, checkpoints)
            path = checkpoints.finish(save_id, manifest.step)
            checkpoints.set_pointer("LATEST", manifest.step)
        except BaseException:
            checkpoints.discard(save_id)
            raise
        return path

    def _download_best(self, newer: CheckpointManifest, checkpoints: CheckpointDirectory) -> None:
        step = newer.best_step
        if step is None or step in (newer.step, *checkpoints.steps()):
            return
        for name in reversed([name for name in self.complete() if step_of(name) == step]):
            save_id = name.partition(".")[2]
            try:
                self._download_files(name, checkpoints.begin(save_id))
                checkpoints.finish(save_id, step)
                return
            except CheckpointError as error:
                log.warning("%s. The checkpoint with the best score is not there", error)
                checkpoints.discard(save_id)
            except BaseException:
                checkpoints.discard(save_id)
                raise

    def _download_files(self, name: str, staging: Path) -> CheckpointManifest:
        manifest = self._download_manifest(name, staging)
        for file_name, entry in manifest.files.items():
            with _explain_missing(self.at(name) / file_name):
                _download(self.at(name) / file_name, staging / file_name, entry)
        return manifest

    def _download_manifest(self, name: str, folder: Path) -> CheckpointManifest:
        source = self.at(name) / MANIFEST_NAME
        with _explain_missing(source):
            write_synced(folder / MANIFEST_NAME, source.read_bytes())
        manifest = load_checkpoint_manifest(folder)
        if remote_name(manifest) != name:
            raise CheckpointError(f"{self.at(name)} has the manifest of {remote_name(manifest)}")
        return manifest

    def _download_run_files(self, run: Path) -> None:
        """Copy the metrics and the tracking state to the run directory, if there are copies."""
        for name in RUN_FILES:
            with suppress(FileNotFoundError):  # tracking may be off
                content = (self.url / name).read_bytes()
                if name == STATE and (state := TrackingState.from_json(content)):
                    # The run continues here, with its MLflow run: older attempts are fenced.
                    content = replace(state, directory=None).to_json().encode() + b"\n"
                write_file(run / name, content)


def step_of(name: str) -> int:
    """The step in the name of a copy."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1])


def all_damaged(remote: RemoteCheckpoints, problems: Iterable[str]) -> CheckpointError:
    """The error of a start that finds only damaged copies, and would replace them."""
    return CheckpointError(
        f"all checkpoints at training.checkpoint_url={remote.url} are damaged: "
        f"{'; '.join(problems)}. Nothing was changed. Restore one from a backup; or begin again "
        "with another URL, or with training.checkpoint_url=null"
    )


@contextmanager
def _explain_missing(source: RemotePath) -> Iterator[None]:
    """Raise CheckpointError if an object does not exist: other errors may end by themselves."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{source} is missing") from None


def _download(source: RemotePath, target: Path, entry: FileEntry) -> None:
    sha256, num_bytes = hashlib.sha256(), 0
    with source.open() as stream, target.open("wb") as file:
        while block := stream.read(_BLOCK_BYTES):
            file.write(block)
            sha256.update(block)
            num_bytes += len(block)
        file.flush()
        os.fsync(file.fileno())
    if num_bytes != entry.bytes:
        raise CheckpointError(f"{source} has {num_bytes:,} bytes, expected {entry.bytes:,}")
    if sha256.hexdigest() != entry.sha256:
        raise CheckpointError(f"{source} has sha256 {sha256.hexdigest()}, expected {entry.sha256}")
