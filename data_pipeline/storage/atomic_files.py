"""Atomic, synced writes of single files, and errors of full or read-only disks.

Sets of files that must appear together are published by `staged_directory.py`.
"""

import contextlib
import errno
import glob
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.errors import ConfigError, UnfinishedError

if TYPE_CHECKING:
    from data_pipeline.storage.remote_path import DatasetPath

PAGE_BYTES = 4096
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def fsync_directory(directory: Path) -> None:
    """Sync a directory, so that renames inside it survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write `data` to `path` and sync it. Not atomic: use it for files in a staging folder."""
    with path.open("wb") as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())


def write_file(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write `path` atomically: a reader sees either the old file or the complete new one."""
    publish_file(path, data)
    fsync_directory(path.parent)


def publish_file(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Like `write_file`, but does not sync the directory after the rename.

    For a file whose appearance makes another process sync and rename the directory.
    """
    # In the same directory, because a rename is atomic within one file system only. The process id
    # keeps two writers of one path from sharing a temporary file.
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_synced(temporary_path, data)
        temporary_path.replace(path)
    finally:
        temporary_path.unlink(missing_ok=True)


def overwrite_page(path: Path, text: str) -> None:
    """Replace the content of a small text file in place, padded with spaces to PAGE_BYTES.

    For files that are rewritten every few seconds. While other processes sync large files, a rename
    was measured to take up to 0.6 s, and this at most 1 ms. One page is one write, so a SIGKILL
    leaves the old text or the new one. After a power failure the text may be old. A concurrent
    reader may see a mixture of both. Raises ValueError if the text is longer than a page.
    """
    data = text.encode().ljust(PAGE_BYTES)
    if len(data) > PAGE_BYTES:
        raise ValueError(f"{path}: {len(data)} bytes do not fit into a page of {PAGE_BYTES}")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, data, 0)
    finally:
        os.close(descriptor)


def write_with(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write(path)`, set the file's mode to that of any new file, and sync it. Not atomic."""
    # safetensors creates its files with mode 0600 and ignores the umask.
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    write(path)
    path.chmod(mode)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files that killed processes left in `write_file(path, ...)`.

    The caller must be the only process that writes `path`.
    """
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError):  # harmless; the next start tries again
            leftover.unlink()


def sha256_file(path: "DatasetPath") -> str:
    """Hex sha256 of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def explain_disk_errors(action: str, directory: Path) -> Iterator[None]:
    """Raise an OSError of writing below `directory` as an UnfinishedError with the next step."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            usable = "unknown"
            with contextlib.suppress(OSError):
                usable = f"{shutil.disk_usage(directory).free:,}"
            raise UnfinishedError(
                f"{directory}: the disk is full while {action} ({usable} bytes free). Partial "
                "files are not used. Free some space and run the command again, or choose another "
                "--out and remove this directory."
            ) from error
        raise UnfinishedError(
            f"{directory}: {action} failed: {error.strerror or error}"
            f"{f' ({error.filename})' if error.filename else ''}. Check permissions and free "
            "space, or choose another --out."
        ) from error


def require_writable(directory: Path) -> None:
    """Raise ConfigError unless files can be created in `directory`. A full disk passes."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        if error.errno not in DISK_FULL:  # `explain_disk_errors` reports a full disk
            raise unwritable_error(directory, error) from error


def unwritable_error(path: Path, error: OSError) -> ConfigError:
    reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror or str(error)
    return ConfigError(
        f"{path} cannot be written: {reason}. Nothing was changed. Choose another directory or "
        "change its permissions."
    )
