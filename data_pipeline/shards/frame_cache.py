"""The frame cache: frames and indexes of remote shards, as fetched, kept on this machine's disk.

One file a piece, named by its source's sha256 and the byte range, so a source that has changed is
never served from here. What it returns is not trusted: the reader checks it as it would the
source's bytes, a frame by its checksum, an index by its hash, and drops a damaged file. Any number
of processes may use one directory; nobody waits for anybody.

Eviction goes by the files' times of last use and touches only regular files, inside the directory,
whose names are of the one pattern; a link is neither followed nor removed.
"""

import contextlib
import os
import re
import stat
import threading
from pathlib import Path
from typing import Self

from data_pipeline.errors import ConfigError
from data_pipeline.storage.urls import is_url, shown

DEFAULT_CACHE_BYTES = 10 * 2**30
DIRECTORY_VARIABLE, BYTES_VARIABLE = "TXL_CACHE_DIR", "TXL_CACHE_BYTES"

_NAME = re.compile(r"txl-frame-[0-9a-f]{64}-\d{1,19}-\d{1,19}(\.\d{1,19}\.\d{1,19}\.tmp)?")
_SLACK = 32  # Between two looks at the whole directory, one part in so many may be written.
_KEPT = 7 / 8  # of the limit, after an eviction


class FrameCache:
    """Pieces of shards on disk, at most about `limit_bytes`. Safe for threads and processes.

    A limit of 0 is no cache: nothing is written, and nothing of an earlier run is read.

    No failure of the disk stops a reader: what cannot be kept is fetched again.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory, self.limit_bytes = directory, limit_bytes
        self._unseen_bytes: int | None = None  # written since the last look; None: never looked
        self._lock = threading.Lock()

    @classmethod
    def of_user(cls) -> Self:
        """The cache by `TXL_CACHE_DIR` and `TXL_CACHE_BYTES`, else in the user's cache directory.

        Raises ConfigError for a URL, and a size that is no number of bytes.
        """
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        given = os.environ.get(DIRECTORY_VARIABLE) or f"{home}/txl/frames"
        if is_url(given):
            raise ConfigError(
                f"{DIRECTORY_VARIABLE}={shown(given)} must be a directory of this machine, not a "
                "URL: the cache saves asking a server twice."
            )
        limit = os.environ.get(BYTES_VARIABLE) or str(DEFAULT_CACHE_BYTES)
        if not re.fullmatch(r"[0-9]{1,18}", limit):
            raise ConfigError(
                f"{BYTES_VARIABLE}={limit!r} must be a number of bytes, such as "
                f"{DEFAULT_CACHE_BYTES} (10 GiB); 0 uses no cache."
            )
        return cls(Path(given).expanduser(), int(limit))

    def get(self, sha256: str, first: int, size: int) -> bytes | None:
        """The piece, marked as just used, or None. May be damaged: check it, and `drop` it."""
        path = self._path(sha256, first, size)
        if not self.limit_bytes:  # switched off: what an earlier run left is not read either
            return None
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_size == size:
                data = path.read_bytes()
                with contextlib.suppress(OSError):  # of another user: it may be evicted early
                    os.utime(path)
                return data
        return None

    def put(self, sha256: str, first: int, data: bytes) -> None:
        """Keep a piece; readers see it whole or not at all."""
        if len(data) > self.limit_bytes:
            return
        path = self._path(sha256, first, len(data))
        aside = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            aside.unlink(missing_ok=True)  # of a killed process that had the same ids
            with aside.open("xb") as file:  # never through a link that stands here
                file.write(data)
            aside.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            return
        self._make_room(len(data))

    def drop(self, sha256: str, first: int, size: int) -> None:
        """Forget a piece."""
        with contextlib.suppress(OSError):
            self._path(sha256, first, size).unlink(missing_ok=True)

    def _path(self, sha256: str, first: int, size: int) -> Path:
        name = f"txl-frame-{sha256}-{first}-{size}"
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a cached piece")
        return self.directory / name

    def _make_room(self, written: int) -> None:
        with self._lock:
            if self._unseen_bytes is not None:
                self._unseen_bytes += written
                if self._unseen_bytes <= self.limit_bytes // _SLACK:
                    return
            self._unseen_bytes = 0
        with contextlib.suppress(OSError):
            self._evict()

    def _evict(self) -> None:
        """Bring the directory below the limit, the longest unused pieces first."""
        found = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another process was here
                    status = entry.stat(follow_symlinks=False)
                    if _NAME.fullmatch(entry.name) and stat.S_ISREG(status.st_mode):
                        found.append((status.st_mtime_ns, status.st_size, entry.name))
        total = sum(size for _, size, _ in found)
        if total <= self.limit_bytes * (1 - 1 / _SLACK):
            return
        for _, size, name in sorted(found):
            if total <= self.limit_bytes * _KEPT:
                break
            with contextlib.suppress(OSError):
                (self.directory / name).unlink(missing_ok=True)
                total -= size
