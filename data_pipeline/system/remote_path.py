"""RemotePath: a dataset at a URL, with the methods of pathlib.Path that readers need.

Requests go through fsspec with retries. A request that still fails is an OSError with a readable
text. Nothing is cached here; `shards/shard_files.py` caches frames.
"""

import contextlib
import errno
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

from data_pipeline.system.sources import (
    SourceError,
    UnreachableError,
    file_system,
    local_path,
    open_source,
    retry_request,
    scheme_of,
    shown,
)


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A file or directory at an s3, gs, http or https URL. Picklable and safe to share by threads.

    Joining keeps a query, such as a web server's token, at the end of the URL.
    """

    url: str

    def __str__(self) -> str:
        return shown(self.url)

    __repr__ = __str__  # without the secrets of the URL

    def __truediv__(self, name: str) -> "RemotePath":
        base, separator, query = self._split()
        return RemotePath(f"{base.rstrip('/')}/{name}{separator}{query}")

    @property
    def name(self) -> str:
        return PurePosixPath(self._split()[0].partition("://")[2]).name

    @property
    def parent(self) -> "RemotePath":
        base, separator, query = self._split()
        return RemotePath(base.rstrip("/").rpartition("/")[0] + separator + query)

    def resolve(self) -> "RemotePath":
        return self

    def stat(self) -> SimpleNamespace:
        """Only `st_size`, in bytes, never cached. Raises OSError, FileNotFoundError if missing."""
        info = self._request(lambda system: system.info(self.url))
        if info["type"] != "file":
            raise IsADirectoryError(errno.EISDIR, "is a folder")
        if info.get("size") is None:
            raise SourceError("its server does not report its size")
        return SimpleNamespace(st_size=int(info["size"]))

    def is_file(self) -> bool:
        try:
            return bool(self.stat())
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        """Whether there are objects below; on a web server, whether the page exists."""
        with contextlib.suppress(OSError):
            return bool(self._request(lambda system: system.exists(self.url)))
        return False

    def sizes(self) -> dict[str, int]:
        """Bytes of every file in this directory, by name; none if it does not exist, and for web
        servers, which do not list. S3 lists 1,000 files per request; `stat` needs one per file.
        """
        if scheme_of(self.url) in ("http", "https"):
            return {}
        return {name: int(info["size"]) for name, info in self._list() if info["type"] == "file"}

    def folders(self) -> list[str]:
        """Names of the folders in this directory, sorted; none if it does not exist."""
        return sorted(name for name, info in self._list() if info["type"] != "file")

    def _list(self) -> list[tuple[str, dict[str, Any]]]:
        listed: list[dict[str, Any]] = []
        with contextlib.suppress(FileNotFoundError):  # a folder exists once it contains a file
            listed = self._request(lambda system: system.ls(self.url, detail=True))
        return [(PurePosixPath(info["name"]).name, info) for info in listed]

    def iterdir(self) -> Iterator["RemotePath"]:
        return (self / name for name in self.sizes())

    def read_bytes(self) -> bytes:
        return bytes(self._request(lambda system: system.cat_file(self.url)))

    def read_range(self, first: int, size: int) -> bytes:
        """Bytes [first, first + size) in one request; fewer if the file ends before."""

        def fetch(system: Any) -> bytes:
            data = bytes(system.cat_file(self.url, start=first, end=first + size))
            # A proxy may cut a response and report the shorter length: the client sees no error.
            if len(data) < size and first + len(data) < (system.info(self.url).get("size") or 0):
                raise UnreachableError(f"the response ended after {len(data):,} of {size:,} bytes")
            return data

        data: bytes = self._request(fetch)
        if len(data) > size:
            raise SourceError("its server ignores byte ranges; use a server that supports them")
        return data

    def open(self, _mode: str = "rb") -> AbstractContextManager[Any]:
        """The content as a stream of bytes, for reading only."""
        return open_source(self.url, "")

    def write_from(self, source: Path) -> None:
        """Upload a local file. Atomic, as object stores make a new object visible when complete."""
        # s3fs reads this many parts of 50 MiB at a time into RAM.
        options = {"max_concurrency": 2} if scheme_of(self.url) == "s3" else {}
        self._request(lambda system: system.put_file(str(source), self.url, **options))

    def write_bytes(self, data: bytes) -> None:
        """Upload `data`. Atomic, as `write_from`."""
        self._request(lambda system: system.pipe_file(self.url, data))

    def remove(self) -> None:
        """Remove this file, or this folder with all files below it. It may be missing."""
        with contextlib.suppress(FileNotFoundError):
            self._request(lambda system: system.rm(self.url, recursive=True))

    def _request(self, request: Callable[[Any], Any]) -> Any:
        system = file_system(self.url)
        return retry_request(lambda: request(system))

    def _split(self) -> tuple[str, str, str]:
        if scheme_of(self.url) in ("http", "https"):
            return self.url.partition("?")
        return self.url, "", ""


DatasetPath = Path | RemotePath
"""A directory or file of a prepared dataset, local or at a URL."""


def dataset_path(address: str | DatasetPath) -> DatasetPath:
    """The path of an address; file:// is a local path. Raises ConfigError for other schemes."""
    if isinstance(address, Path | RemotePath):
        return address
    local = local_path(address)
    return RemotePath(address) if local is None else Path(local)
