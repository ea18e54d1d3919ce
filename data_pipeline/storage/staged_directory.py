"""A directory whose files are published together, the manifest last.

Files that mean something only together are written in a hidden folder inside the target, synced,
moved to their names, and the one that makes the set valid (a manifest) is moved last. A process
killed at any moment leaves either no manifest or a complete set. Files that it staged stay for the
next process, which uses or discards them. The lock is the kernel's (flock), so it is never stale.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self

from data_pipeline.errors import ConfigError, DataError, UnfinishedError
from data_pipeline.storage.atomic_files import (
    DISK_FULL,
    explain_disk_errors,
    fsync_directory,
    require_writable,
    unwritable_error,
    write_synced,
)
from data_pipeline.storage.locks import try_lock

STAGING = ".staging.tmp"
"""The folder inside the target where files are written aside."""
_MOVING = "moving.json"
"""In the staging folder: names that may already stand in the target, written before any move."""


class StagedDirectory:
    """Exclusive hold on `directory`, with a staging folder whose files `publish` moves out.

    Use as a context manager. Entering locks the directory, creating it if needed, and takes back
    into staging what a killed process had moved out without the last file. Leaving removes the
    staging folder, and the directory itself if this hold created it and nothing is in it; but
    staging stays when it is `worth_keeping` (what was found there is; say so for what is made) and
    the end says nothing against it, so that the next claim can go on: anything raised but a
    ConfigError, or a DataError that is no UnfinishedError. Raises ConfigError for a path that can
    be no directory, DataError when another process holds the directory.
    """

    def __init__(self, directory: Path, *, last: str) -> None:
        self.directory = directory
        self.last = last
        self.path = directory / STAGING
        self.worth_keeping = False
        self._descriptor = -1
        self._created = False

    def __enter__(self) -> Self:
        with explain_disk_errors("opening the output directory", self.directory):
            self._create()
            self._descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                self._lock()
                self._take_back()
                self.worth_keeping = self.path.is_dir()
            except BaseException:
                os.close(self._descriptor)
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        refused = isinstance(error, ConfigError | DataError)
        stopped = isinstance(error, UnfinishedError) or not (error is None or refused)
        try:
            # A full or failing disk must not hide the error that is on its way.
            with contextlib.suppress(OSError):
                if not (self.worth_keeping and stopped):
                    self.discard()
                if self._created:
                    self.directory.rmdir()  # only succeeds on an empty one
        finally:
            os.close(self._descriptor)

    def stage(self, *, fresh: bool = True) -> Path:
        """The staging folder to write the files in, empty unless what is left there may be used.

        Raises ConfigError for a directory that must not be written.
        """
        require_writable(self.directory)
        if fresh:
            self.discard()
        self.path.mkdir(exist_ok=True)
        return self.path

    def discard(self) -> None:
        """Remove the staging folder and all that is in it."""
        self.worth_keeping = False
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path)

    def publish(self, names: Collection[str]) -> None:
        """Move the staged files `names` to their places, `last` after all others, synced before.

        What else is staged is removed when the hold ends.
        """
        if self.last not in names:
            raise ValueError(f"publish needs {self.last} among the staged files {sorted(names)}")
        moving = sorted(name for name in names if name != self.last)
        write_synced(self.path / _MOVING, json.dumps(moving).encode())
        fsync_directory(self.path)
        for name in moving:
            (self.path / name).replace(self.directory / name)
        fsync_directory(self.directory)
        (self.path / self.last).replace(self.directory / self.last)
        fsync_directory(self.directory)

    def _create(self) -> None:
        try:
            self._created = not self.directory.exists()
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in DISK_FULL:
                raise
            raise unwritable_error(self.directory, error) from error

    def _lock(self) -> None:
        if not try_lock(self._descriptor):
            raise DataError(
                f"{self.directory}: another process is writing here. Wait for it, or choose "
                "another --out."
            )

    def _take_back(self) -> None:
        if self.path.is_symlink() or not self.path.is_dir():
            return
        if (self.directory / self.last).exists():
            shutil.rmtree(self.path)  # all was published, or the staged was never the dataset here
            return
        # Killed between the first move and the last: the moved files are ours.
        for name in self._names_in_motion():
            if (self.directory / name).is_file():
                (self.directory / name).replace(self.path / name)
        (self.path / _MOVING).unlink(missing_ok=True)

    def _names_in_motion(self) -> list[str]:
        try:
            names = json.loads((self.path / _MOVING).read_bytes())
        except (OSError, ValueError):  # never got that far, or died writing it: nothing was moved
            return []
        if not isinstance(names, list):
            return []
        return [name for name in names if isinstance(name, str) and Path(name).name == name]
