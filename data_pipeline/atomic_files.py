"""Files that appear whole or not at all, and directories published in one motion.

`write_file` is for one file. `StagedDirectory` is for a set of files that mean something only
together: they are written in a hidden folder inside the target, synced, moved to their names, and
the one that makes the set valid (a manifest) is moved last. A process killed at any moment leaves
either no manifest or a complete set. What it had staged is there for the next claim, which uses it
or discards it: only the caller knows what it is worth.

Knows nothing of shards or checkpoints. The lock is the kernel's (flock on the directory), so a
killed process never leaves a stale one.
"""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from data_pipeline.errors import ConfigError, DataError, UnfinishedError

if TYPE_CHECKING:
    from data_pipeline.remote import DatasetPath

STAGING = ".staging.tmp"
"""The folder inside the target where files are written aside."""
_MOVING = "moving.json"
"""In the staging folder: names that may already stand in the target, written before any move."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def fsync_directory(directory: Path) -> None:
    """Make the renames inside `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Write `data` to `path` and wait until it is on disk. Not atomic: for files still aside."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_file(path: Path, data: bytes) -> None:
    """Put `data` at `path` in one step: a reader sees the old file or the whole new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_synced(aside, data)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    fsync_directory(path.parent)


def write_with(path: Path, write: Callable[[Path], object]) -> None:
    """Let a library write `path`, give it the mode of any new file here, and sync it. Not atomic.

    safetensors makes its files readable by their owner only, whatever the umask says.
    """
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    write(path)
    path.chmod(mode)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def remove_leftovers(path: Path) -> None:
    """Remove what killed processes left of their `write_file(path, ...)`.

    Only for a caller that knows that nobody else writes `path` now.
    """
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError):  # it does no harm, and the next start tries again
            leftover.unlink()


def sha256_file(path: "DatasetPath") -> str:
    """Hex sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def explain_disk_errors(what: str, directory: Path) -> Iterator[None]:
    """Turn an OSError while writing into an UnfinishedError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            usable = "unknown"
            with contextlib.suppress(OSError):
                usable = f"{shutil.disk_usage(directory).free:,}"
            raise UnfinishedError(
                f"{directory}: the disk is full while {what} ({usable} bytes free). Nothing "
                "half-written counts. Free some space and run it again, or choose another --out "
                "and remove this one."
            ) from error
        raise UnfinishedError(
            f"{directory}: {what} failed: {error.strerror or error}"
            f"{f' ({error.filename})' if error.filename else ''}. Check the permissions and the "
            "space there, or choose another --out."
        ) from error


def require_writable(directory: Path) -> None:
    """Raises ConfigError unless files can be made in a directory."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        if error.errno not in _FULL:  # which is no fault of the path, and named where it hurts
            raise _unwritable(directory, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror or str(error)
    return ConfigError(
        f"{path} cannot be written: {reason}. Nothing was touched; choose another directory, or "
        "change its permissions."
    )


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
            if error.errno in _FULL:
                raise
            raise _unwritable(self.directory, error) from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{self.directory}: another process is writing here. Wait for it, or choose "
                "another --out."
            ) from None
        except OSError:
            return  # a file system without locks; staging alone still keeps names whole

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
