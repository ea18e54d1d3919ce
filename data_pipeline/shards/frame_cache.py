"""The frame cache: compressed frames and indexes of shards elsewhere, on the local disk.

The shards are at a URL or on a network file system.

One file per entry, named by the sha256 of its source and the byte range, so the cache never returns
bytes of an older version of a source. Entries are not trusted: the reader checks a cached frame's
checksum or index's sha256 as it does for fetched bytes, and drops a damaged file. Any number of
processes may use one directory, without locks.

Least recently used entries are evicted first. Only regular files in the directory with a name of
one pattern are removed; links are not followed and not removed.
"""

import contextlib
import os
import re
import stat
import threading
from pathlib import Path
from typing import Self

from data_pipeline.errors import ConfigError
from data_pipeline.system.sources import is_url, shown

DEFAULT_CACHE_BYTES = 10 * 2**30
DIRECTORY_VARIABLE, BYTES_VARIABLE = "TXL_CACHE_DIR", "TXL_CACHE_BYTES"

_NAME = re.compile(r"txl-frame-[0-9a-f]{64}-\d{1,19}-\d{1,19}(\.\d{1,19}\.\d{1,19}\.tmp)?")
# Listing the directory for every new entry would be slow. A process lists it after writing 1/32 of
# the limit; an eviction reduces the cache to 28/32 of it. So up to four processes stay below the
# limit, and more may exceed it by 1/32 each.
_SLACK = 32
_SHARE_AFTER_EVICTION = 7 / 8


class FrameCache:
    """Byte ranges of other files on disk, at most about `limit_bytes`. Thread- and process-safe.

    A limit of 0 turns the cache off: nothing is written, and entries of earlier runs are not read.
    Disk errors never stop a reader: an entry that cannot be stored is fetched again.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory, self.limit_bytes = directory, limit_bytes
        # Bytes written since the directory was last listed; None before the first listing.
        self._unlisted_bytes: int | None = None
        self._lock = threading.Lock()

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

    def get(self, sha256: str, first: int, size: int) -> bytes | None:
        """The entry, marked as used now, or None. It may be damaged: check it, and `drop` it."""
        path = self._path(sha256, first, size)
        if not self.limit_bytes:
            return None
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_size == size:
                data = path.read_bytes()
                with contextlib.suppress(OSError):  # another user's file: it may be evicted early
                    os.utime(path)
                return data
        return None

    def put(self, sha256: str, first: int, data: bytes) -> None:
        """Store an entry. Readers see the complete file or none."""
        if len(data) > self.limit_bytes:
            return
        path = self._path(sha256, first, len(data))
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)  # left by a killed process with the same ids
            with temporary.open("xb") as file:  # "x": never writes through an existing link
                file.write(data)
            temporary.replace(path)  # no fsync: a damaged entry is only fetched again
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            return
        self._limit_size(len(data))

    def drop(self, sha256: str, first: int, size: int) -> None:
        """Remove an entry."""
        with contextlib.suppress(OSError):
            self._path(sha256, first, size).unlink(missing_ok=True)

    def _path(self, sha256: str, first: int, size: int) -> Path:
        return self.directory / f"txl-frame-{sha256}-{first}-{size}"

    def _limit_size(self, num_written: int) -> None:
        with self._lock:
            if self._unlisted_bytes is not None:
                self._unlisted_bytes += num_written
                if self._unlisted_bytes <= self.limit_bytes // _SLACK:
                    return
            self._unlisted_bytes = 0
        with contextlib.suppress(OSError):
            self._evict()

    def _evict(self) -> None:
        """Reduce the directory below the limit, least recently used entries first."""
        cached = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another process evicts as well
                    status = entry.stat(follow_symlinks=False)
                    if _NAME.fullmatch(entry.name) and stat.S_ISREG(status.st_mode):
                        cached.append((status.st_mtime_ns, status.st_size, entry.name))
        total = sum(size for _, size, _ in cached)
        if total <= self.limit_bytes * (1 - 1 / _SLACK):
            return
        for _, size, name in sorted(cached):
            if total <= self.limit_bytes * _SHARE_AFTER_EVICTION:
                break
            with contextlib.suppress(OSError):
                (self.directory / name).unlink(missing_ok=True)
                total -= size
