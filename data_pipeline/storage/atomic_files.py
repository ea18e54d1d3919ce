"""Files that appear whole or not at all, synced to disk.

Directories of files that belong together are `staged_directory.py`'s.
"""

import contextlib
import errno
import glob
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.errors import ConfigError, UnfinishedError

if TYPE_CHECKING:
    from data_pipeline.storage.remote_path import DatasetPath

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


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
        if error.errno in DISK_FULL:
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
        if error.errno not in DISK_FULL:  # which is no fault of the path, and named where it hurts
            raise unwritable_error(directory, error) from error


def unwritable_error(path: Path, error: OSError) -> ConfigError:
    reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror or str(error)
    return ConfigError(
        f"{path} cannot be written: {reason}. Nothing was touched; choose another directory, or "
        "change its permissions."
    )
