"""Parts of shard and index files, from a local path or a URL, and the frame cache.

Every error names the file, the place in it and the next command. A file that cannot be read at the
moment (disk, network, permissions) and a damaged file are different errors: the first may be
intact, the second must not be used.
"""

import contextlib
import errno
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar

from data_pipeline.errors import ConfigError, DataError, UnreadableError
from data_pipeline.shards.manifest import ShardEntry
from data_pipeline.system.files import open_descriptor, publish_file
from data_pipeline.system.remote_path import DatasetPath, RemotePath
from data_pipeline.system.sources import is_read_failure, is_url, shown

_MAY_PASS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
"""Errors of a disk or a network file system after which a second attempt may succeed."""
_WAITS_SECONDS = (0.5, 1.0)
"""Before the second and the third attempt."""
_reading: dict[int, DatasetPath] = {}
"""The file that a thread is reading now, by the thread's identifier."""


def read_bytes_at(path: DatasetPath, first: int, size: int, part: str = "") -> bytes:
    """Bytes [first, first + size) of a file, fewer if the file is shorter.

    Raises DataError if the read fails; `part` names the part of the file in its message.
    """
    thread = threading.get_ident()
    _reading[thread] = path
    try:
        if isinstance(path, RemotePath):
            return path.read_range(first, size)
        return _read_local(path, first, size)
    except OSError as error:
        raise unreadable_file(path, part, error) from error
    finally:
        del _reading[thread]


def file_read_by(thread: int | None) -> DatasetPath | None:
    """The file that a thread is reading now; a file system may never answer."""
    return None if thread is None else _reading.get(thread)


def _read_local(path: Path, first: int, size: int) -> bytes:
    """Read again after an error that may pass, as `retry_request` does for URLs."""
    waits_seconds = iter(_WAITS_SECONDS)
    while True:
        try:
            # Opened for every read: a corpus may have more shards than a process may have open
            # files.
            with open_descriptor(path) as descriptor:
                return os.pread(descriptor, size, first)
        except OSError as error:
            wait_seconds = next(waits_seconds, None)
            if error.errno not in _MAY_PASS or wait_seconds is None:
                raise
            time.sleep(wait_seconds)


def check_sizes(directory: DatasetPath, entries: Sequence[ShardEntry]) -> None:
    """Refuse shards and indexes that are missing or do not have the manifest's size.

    Skipped on web servers: they cannot list a directory, and one request per file would be slow.
    Hashes and checksums are still compared when the content is read.
    """
    try:
        if isinstance(directory, RemotePath):
            sizes = directory.sizes()
        else:
            with os.scandir(directory) as files:
                sizes = {file.name: file.stat().st_size for file in files if file.is_file()}
    except OSError as error:
        raise unreadable_file(directory, "", error) from error
    if isinstance(directory, RemotePath) and not sizes:
        return
    for entry in entries:
        for name, (expected, _) in entry.files.items():
            if name not in sizes:
                raise damaged_file(directory / name, "is missing, or not a regular file")
            if sizes[name] != expected:
                raise damaged_file(
                    directory / name, f"is {sizes[name]:,} bytes, expected {expected:,}"
                )


def unreadable_file(path: DatasetPath, part: str, error: OSError) -> DataError:
    """The DataError for a failed read of `part` of a file, or of all of it if `part` is empty."""
    problem = f"{part} cannot be read ({error.strerror})".lstrip()
    if not is_read_failure(error):
        return damaged_file(path, problem)
    return UnreadableError(
        f"{path} {problem}. Check {what_to_check(path)}, then run it again: nothing was changed."
    )


def what_to_check(path: DatasetPath) -> str:
    """The likely causes when a file cannot be read."""
    local, remote = "the disk and the permissions", "the address, the credentials and the network"
    return remote if isinstance(path, RemotePath) else local


def damaged_file(path: DatasetPath, problem: str) -> DataError:
    """The DataError for a file whose content is not what the manifest or the index requires."""
    return DataError(
        f"{path} {problem}. The file was cut short, damaged, or swapped with another after it was "
        f"written. To list everything that is wrong: txl data verify {path.parent}"
    )


# --- the frame cache ------------------------------------------------------------------------------


DEFAULT_CACHE_BYTES = 10 * 2**30
DIRECTORY_VARIABLE, BYTES_VARIABLE = "TXL_CACHE_DIR", "TXL_CACHE_BYTES"

_PREFIX = "txl-frame-"
# Listing the directory for every new entry would be slow. A process lists it after writing 1/32 of
# the limit, and then reduces it to 7/8. Several processes may exceed the limit by 1/32 each.
_SHARE_BETWEEN_LISTS = 1 / 32
_SHARE_AFTER_EVICTION = 7 / 8
_Checked = TypeVar("_Checked")


class FrameCache:
    """Byte ranges of other files on disk, at most about `limit_bytes`. Thread- and process-safe.

    A limit of 0 turns the cache off: nothing is written, and entries of earlier runs are not read.
    Disk errors never stop a reader: an entry that cannot be stored is fetched again.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory, self.limit_bytes = directory, limit_bytes
        # Bytes written since the directory was last listed. The first entry lists it.
        self._unlisted_bytes = limit_bytes

    @classmethod
    def of_user(cls) -> Self:
        """The cache of `TXL_CACHE_DIR` and `TXL_CACHE_BYTES`; default: in the user's cache folder.

        Raises ConfigError for a URL, and for a size that is not a number of bytes.
        """
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        directory = os.environ.get(DIRECTORY_VARIABLE) or f"{home}/txl/frames"
        if is_url(directory):
            raise ConfigError(
                f"{DIRECTORY_VARIABLE}={shown(directory)} must be a local directory, not a URL."
            )
        limit = os.environ.get(BYTES_VARIABLE) or str(DEFAULT_CACHE_BYTES)
        if not re.fullmatch(r"[0-9]{1,18}", limit):
            raise ConfigError(
                f"{BYTES_VARIABLE}={limit!r} must be a number of bytes, such as "
                f"{DEFAULT_CACHE_BYTES} (10 GiB); 0 turns the cache off."
            )
        return cls(Path(directory).expanduser(), int(limit))

    def read(
        self,
        path: DatasetPath,
        first: int,
        size: int,
        *,
        sha256: str,
        check: Callable[[bytes], _Checked],
        part: str = "",
    ) -> _Checked:
        """`check` of bytes [first, first + size) of the file `path`, from here or from the file.

        `sha256` is that of the file. `check` raises DataError for wrong bytes: a damaged entry is
        read again from the file. Raises as `read_bytes_at` does.
        """
        if not self.limit_bytes:
            return check(read_bytes_at(path, first, size, part))
        entry = self.directory / f"{_PREFIX}{sha256}-{first}-{size}"
        with contextlib.suppress(OSError, DataError):
            if entry.is_file():  # reading a named pipe would block
                checked = check(entry.read_bytes())
                with contextlib.suppress(OSError):  # another user's file: it may be evicted early
                    os.utime(entry)
                return checked
        data = read_bytes_at(path, first, size, part)
        checked = check(data)
        if len(data) <= self.limit_bytes:
            with contextlib.suppress(OSError):
                self.directory.mkdir(parents=True, exist_ok=True)
                publish_file(entry, data)
                self._limit_size(len(data))
        return checked

    def _limit_size(self, num_written: int) -> None:
        """From time to time, reduce the directory, least recently used entries first."""
        self._unlisted_bytes += num_written  # a lost update of another thread only delays it
        if self._unlisted_bytes <= self.limit_bytes * _SHARE_BETWEEN_LISTS:
            return
        self._unlisted_bytes = 0
        entries = []
        for path in self.directory.glob(f"{_PREFIX}*"):
            with contextlib.suppress(FileNotFoundError):  # another process evicts as well
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    entries.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total > self.limit_bytes * _SHARE_AFTER_EVICTION:
                path.unlink(missing_ok=True)
                total -= size


NO_CACHE = FrameCache(Path(), limit_bytes=0)
