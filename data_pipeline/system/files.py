"""Files and directories that appear complete or not at all, and locks.

The kernel releases a lock when its holder ends, also by SIGKILL, so there are no stale locks. A
file system without locks counts as unlocked, unless the caller decides otherwise: most locks only
prevent mistakes of users on one host. The package filelock is not used: it truncates the lock file
when it opens it, which would erase the name of the holder, and it cannot lock a directory.
"""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

from data_pipeline.errors import ConfigError, DataError, UnfinishedError, UnreadableError

if TYPE_CHECKING:
    from data_pipeline.system.remote_path import DatasetPath

PAGE_BYTES = 4096
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
POLL_SECONDS = 0.1
STAGING = ".staging.tmp"
"""The staging folder inside the target directory."""
_MOVES = "moves.json"
"""In the staging folder: the files that may already be in the target, written before any move."""


@contextlib.contextmanager
def open_descriptor(path: str | Path, flags: int = os.O_RDONLY | os.O_NONBLOCK) -> Iterator[int]:
    """A descriptor, for reading by default. Opening a named pipe does not wait for a writer."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def fsync_directory(directory: Path) -> None:
    """Sync a directory, so that renames inside it survive a power failure."""
    with open_descriptor(directory) as descriptor:
        os.fsync(descriptor)


def write_synced(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write `data` to `path` and sync it. Not atomic: use it for files in a staging folder."""
    try:
        with path.open("wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # That of a full disk names no file; that of an iterable names the file that it reads.
        error.filename = error.filename or str(path)
        raise


def write_file(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write `path` atomically: a reader sees either the old file or the complete new one."""
    publish_file(path, data)
    fsync_directory(path.parent)


def publish_file(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Like `write_file`, for a caller that syncs the directory itself."""
    # In the same directory, because a rename is atomic within one file system only. The process id
    # keeps two writers of one path from sharing a temporary file.
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_synced(temporary_path, data)
        temporary_path.replace(path)
    except OSError as error:
        if error.filename == str(temporary_path):  # a name that nobody has given
            error.filename = str(path)
        raise
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
    with open_descriptor(path, os.O_WRONLY | os.O_CREAT) as descriptor:
        os.pwrite(descriptor, data, 0)


def remove_leftovers(path: Path) -> None:
    """Remove what killed processes left of `write_file(path, ...)`. No other may be writing it."""
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
        free = "unknown"
        with contextlib.suppress(OSError):
            free = f"{shutil.disk_usage(directory).free:,}"
        raise UnfinishedError(
            f"{directory}: {action} failed: {error.strerror or error}"
            f"{f' ({error.filename})' if error.filename else ''}; {free} bytes are free. Partial "
            "files are not used. Check permissions and free space and run the command again, or "
            "choose another --out and remove this directory."
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


def try_lock(descriptor: int, *, shared: bool = False, if_unsupported: bool = True) -> bool:
    """Take the lock of an open file or directory; False if another process prevents it.

    It is exclusive, or `shared` by any number of processes, until the descriptor is closed or the
    process ends. `if_unsupported` is the result on a file system without locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # No lock service (ENOLCK), or NFS, which locks only descriptors that are open for writing
        # (EBADF for a directory).
        return if_unsupported
    return True


def is_locked(path: Path, *, if_unsupported: bool = False) -> bool:
    """Whether a process holds the exclusive lock of a file; False without a file.

    Takes a shared lock for a moment: who wants the lock then waits POLL_SECONDS for it.
    """
    try:
        with open_descriptor(path) as descriptor:
            return not try_lock(descriptor, shared=True, if_unsupported=not if_unsupported)
    except OSError:
        return False


def wait_for_lock(descriptor: int, *, timeout_seconds: float) -> bool:
    """Poll `try_lock` until it succeeds; False after `timeout_seconds`."""
    deadline = time.monotonic() + timeout_seconds
    while not try_lock(descriptor):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def publish_directory(staged: Path, final: Path) -> Path | None:
    """Rename a complete directory, whose files are synced, to its final name.

    An existing `final` is renamed to a hidden name first; returns that name, or None. The caller
    removes it: if that fails, `final` is valid nevertheless.
    """
    fsync_directory(staged)
    replaced = _hide(final) if final.exists() else None
    try:
        staged.rename(final)
    except OSError:  # `staged` is gone: a newer process removes what older ones write
        if replaced:
            replaced.rename(final)
        raise
    fsync_directory(final.parent)
    return replaced


def remove_directory(path: Path) -> None:
    """Remove a directory and its content. Raises OSError if anything of it remains.

    It is renamed to a hidden name `.*.tmp` first, so a kill never leaves half of it under `path`.
    """
    shutil.rmtree(_hide(path))


def _hide(path: Path) -> Path:
    stem = path.name.lstrip(".").partition(".")[0]  # of a hidden name, without its random part
    return path.rename(path.with_name(f".{stem}.{uuid.uuid4().hex[:8]}.tmp"))


class StagedDirectory:
    """Exclusive access to `directory`, with a staging folder. Use as a context manager.

    Files are written to a hidden staging folder inside the directory and synced. `publish` moves
    them to the directory, the manifest last. A process killed at any time leaves either no manifest
    or a complete set. `publish` records size and modification time of the files before it moves
    them: of an interrupted publication, the next process moves those files back, and no others.

    Entering creates and locks the directory. Raises ConfigError for a path that cannot be a
    directory, DataError if another process holds the lock.

    Leaving removes the staging folder, and the directory if it was created here and is empty. The
    staging folder stays for the next process if `keep_staging` is true and the block was
    interrupted: by any exception except ConfigError and DataError, or by UnfinishedError or
    UnreadableError. With `keeps_unused`, that of an earlier process also stays if `stage` was not
    called. `keep_staging` is true on entry if there is a staging folder already; set it after
    staging files that can be reused.
    """

    def __init__(self, directory: Path, *, last: str, keeps_unused: bool = False) -> None:
        self.directory = directory
        self.last = last
        self.path = directory / STAGING
        self.keep_staging = False
        self._is_unused = keeps_unused

    def __enter__(self) -> Self:
        with (
            explain_disk_errors("opening the output directory", self.directory),
            contextlib.ExitStack() as lock,
        ):
            try:
                places = (self.directory, *self.directory.parents)
                self._created = [place for place in places if not place.exists()]
                self.directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                if error.errno in DISK_FULL:
                    raise
                raise unwritable_error(self.directory, error) from error
            descriptor = lock.enter_context(open_descriptor(self.directory))
            if not (try_lock(descriptor) and self._is_still(descriptor)):
                raise DataError(
                    f"{self.directory}: another process is writing here. Wait for it, or choose "
                    "another --out."
                )
            self._undo_interrupted_publication()
            self.keep_staging = self.path.is_dir()
            self._lock = lock.pop_all()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        interrupted = isinstance(error, UnfinishedError | UnreadableError) or not isinstance(
            error, ConfigError | DataError | None
        )
        # An OSError of a full or failing disk must not replace the exception being raised.
        with self._lock, contextlib.suppress(OSError):
            if not (self._is_unused or (self.keep_staging and interrupted)):
                self.discard()
            if self._created:
                self.directory.rmdir()  # fails if it is not empty

    def stage(self, *, fresh: bool = True) -> Path:
        """The staging folder, emptied if `fresh`. Raises ConfigError if it cannot be written."""
        require_writable(self.directory)
        self._is_unused = False
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
        """Move the staged and synced files `names` into the directory, `last` after the others."""
        if self.last not in names:
            raise ValueError(f"publish needs {self.last} among the staged files {sorted(names)}")
        moves = {name: _stamp(self.path / name) for name in sorted(names) if name != self.last}
        write_synced(self.path / _MOVES, json.dumps(moves).encode())
        for folder in (self.path, *(created.parent for created in self._created)):
            fsync_directory(folder)
        # Of an earlier set, which this one replaces: it must not appear next to new files.
        (self.directory / self.last).unlink(missing_ok=True)
        fsync_directory(self.directory)
        for name in moves:
            (self.path / name).replace(self.directory / name)
        fsync_directory(self.directory)  # the other moves must be on disk before that of `last`
        (self.path / self.last).replace(self.directory / self.last)
        fsync_directory(self.directory)

    def _undo_interrupted_publication(self) -> None:
        if self.path.is_symlink() or not self.path.is_dir():
            return
        if (self.directory / self.last).exists():
            shutil.rmtree(self.path)  # everything was published, or somebody put another set here
            return
        try:
            moves = json.loads((self.path / _MOVES).read_bytes())
        except (FileNotFoundError, ValueError):  # missing or cut: killed before the first move
            return
        for name, stamp in moves.items():
            path = self.directory / name
            if path.exists() and _stamp(path) == stamp:  # else somebody put another file here
                path.replace(self.path / name)

    def _is_still(self, descriptor: int) -> bool:
        """Whether the open directory still has its name: a process that had created it may have
        removed it before it was locked here, and another one may have created it again."""
        try:
            return os.path.samestat(os.fstat(descriptor), self.directory.stat())
        except FileNotFoundError:
            return False


def _stamp(path: Path) -> list[int]:
    """Size and modification time, which a move does not change."""
    status = path.lstat()
    return [status.st_size, status.st_mtime_ns]
