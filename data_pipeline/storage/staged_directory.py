"""StagedDirectory: publish a set of files together, the manifest last.

Files are written to a hidden staging folder inside the target directory and synced. `publish`
renames them to their final names, the manifest last. A process killed at any time leaves either no
manifest or a complete set. The next process reuses or discards the staged files.

A rename is not atomic for a set of files, so the names to be moved are recorded first
(`moving.json`). If the process is killed between two renames, the next process moves the files back
to the staging folder.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
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
"""The staging folder inside the target directory."""
_MOVING = "moving.json"
"""In the staging folder: names that may already be in the target, written before any rename."""


class StagedDirectory:
    """Exclusive access to `directory`, with a staging folder. Use as a context manager.

    Entering creates and locks the directory, and moves the files of an incomplete publication back
    to staging. Raises ConfigError for a path that cannot be a directory, DataError if another
    process holds the lock.

    Leaving removes the staging folder, and the directory if it was created here and is empty. The
    staging folder stays for the next process if `keep_staging` is true and the block was
    interrupted: by any exception except ConfigError and DataError, or by UnfinishedError.
    `keep_staging` is true on entry if there is a staging folder already; set it after staging
    files that can be reused.
    """

    def __init__(self, directory: Path, *, last: str) -> None:
        self.directory = directory
        self.last = last
        self.path = directory / STAGING
        self.keep_staging = False
        self._descriptor = -1
        self._created = False

    def __enter__(self) -> Self:
        with explain_disk_errors("opening the output directory", self.directory):
            self._create()
            self._descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if not (try_lock(self._descriptor) and self._is_present()):
                    raise DataError(
                        f"{self.directory}: another process is writing here. Wait for it, or "
                        "choose another --out."
                    )
                self._undo_incomplete_publish()
                self.keep_staging = self.path.is_dir()
            except BaseException:
                os.close(self._descriptor)
                raise
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        rejected = isinstance(error, ConfigError | DataError)
        interrupted = isinstance(error, UnfinishedError) or not (error is None or rejected)
        try:
            # An OSError of a full or failing disk must not replace the exception being raised.
            with contextlib.suppress(OSError):
                if not (self.keep_staging and interrupted):
                    self.discard()
                if self._created:
                    self.directory.rmdir()  # fails if it is not empty
        finally:
            os.close(self._descriptor)

    def stage(self, *, fresh: bool = True) -> Path:
        """Create and return the staging folder. `fresh`: remove the files that are in it.

        Raises ConfigError for a directory that is not writable.
        """
        require_writable(self.directory)
        if fresh:
            self.discard()
        self.path.mkdir(exist_ok=True)
        return self.path

    def discard(self) -> None:
        """Remove the staging folder with its files."""
        self.keep_staging = False
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path)

    def publish(self, names: Collection[str]) -> None:
        """Rename the staged files `names` into the directory, `last` after all others.

        The files must be synced. Other staged files are removed on exit.
        """
        if self.last not in names:
            raise ValueError(f"publish needs {self.last} among the staged files {sorted(names)}")
        moving = sorted(name for name in names if name != self.last)
        write_synced(self.path / _MOVING, json.dumps(moving).encode())
        fsync_directory(self.path)
        # Of an earlier set, which this one replaces: it must not appear next to new files.
        (self.directory / self.last).unlink(missing_ok=True)
        fsync_directory(self.directory)
        for name in moving:
            (self.path / name).replace(self.directory / name)
        fsync_directory(self.directory)  # the other renames must be on disk before that of `last`
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

    def _is_present(self) -> bool:
        """Whether the open directory still has its name: a process that had created it may have
        removed it before it was locked here, and another one may have created it again."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.directory.stat())
        except FileNotFoundError:
            return False

    def _undo_incomplete_publish(self) -> None:
        if self.path.is_symlink() or not self.path.is_dir():
            return
        if (self.directory / self.last).exists():
            shutil.rmtree(self.path)  # everything was published; the rest is not needed
            return
        # Killed between the first rename and the last.
        for name in self._recorded_names():
            # A file that is still staged was not moved: that in the target is of an earlier set.
            if (self.directory / name).is_file() and not (self.path / name).exists():
                (self.directory / name).replace(self.path / name)
        (self.path / _MOVING).unlink(missing_ok=True)

    def _recorded_names(self) -> list[str]:
        try:
            names = json.loads((self.path / _MOVING).read_bytes())
        except (OSError, ValueError):  # missing or cut: killed before the first rename
            return []
        # Only plain names: a damaged record must not move files of other directories.
        names = names if isinstance(names, list) else []
        return [name for name in names if isinstance(name, str) and Path(name).name == name]
