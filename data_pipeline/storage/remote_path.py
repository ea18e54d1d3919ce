"""Datasets behind URLs: as much of pathlib as reading a dataset needs, by fsspec.

A `RemotePath` stands where a `Path` would, so whoever reads a manifest, an index or a frame does
not ask where it lies. Every request is tried again with growing waits (`readers/sources.py`, which
also decides which schemes are read); what still fails is an OSError whose text is for people, and
a path shows itself without credentials. Nothing is kept between requests: `frame_cache.py` does.
"""

import contextlib
import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from data_pipeline.storage.open_source import open_source
from data_pipeline.storage.source_errors import SourceError, UnreachableError
from data_pipeline.storage.urls import file_system, local_path, retry_request, scheme_of, shown

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A file or directory named by a URL of scheme s3, gs, http or https. Safe to send and share.

    A query, such as a web server's token, is kept behind the path that is joined to it.
    """

    url: str

    def __str__(self) -> str:
        return shown(self.url)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __truediv__(self, name: str) -> "RemotePath":
        base, mark, query = self._split()
        return RemotePath(f"{base.rstrip('/')}/{name}{mark}{query}")

    @property
    def name(self) -> str:
        return PurePosixPath(self._split()[0].partition("://")[2]).name

    @property
    def parent(self) -> "RemotePath":
        base, mark, query = self._split()
        return RemotePath(base.rstrip("/").rpartition("/")[0] + mark + query)

    def resolve(self) -> "RemotePath":
        return self

    def stat(self) -> SimpleNamespace:
        """`st_size` in bytes, as it is now. Raises OSError, FileNotFoundError if it is missing."""
        info = self._ask(lambda system: system.info(self.url))
        if info["type"] != "file":
            raise IsADirectoryError(errno.EISDIR, "is a folder")
        if info.get("size") is None:
            raise SourceError("its server does not say how long it is")
        return SimpleNamespace(st_size=int(info["size"]))

    def is_file(self) -> bool:
        try:
            return bool(self.stat())
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        """Whether anything lies below; on a web server, whether there is a page."""
        with contextlib.suppress(OSError):
            if scheme_of(self.url) in ("http", "https"):
                return bool(self._ask(lambda system: system.exists(self.url)))
            return bool(self._ask(lambda system: system.ls(self.url, detail=False)))
        return False

    def sizes(self) -> dict[str, int]:
        """Bytes of every file in this directory, by name; nothing on web servers: they list none.

        One request per thousand files, where asking each file would be one request a file.
        """
        if scheme_of(self.url) in ("http", "https"):
            return {}
        listed = self._ask(lambda system: system.ls(self.url, detail=True))
        return {
            PurePosixPath(info["name"]).name: int(info["size"])
            for info in listed
            if info["type"] == "file"
        }

    def iterdir(self) -> Iterator["RemotePath"]:
        return (self / name for name in self.sizes())

    def read_bytes(self) -> bytes:
        data: bytes = self._ask(lambda system: system.cat_file(self.url))
        return data

    def read_text(self, encoding: str) -> str:
        return self.read_bytes().decode(encoding)

    def read_range(self, first: int, size: int) -> bytes:
        """Bytes [first, first + size), by one request; fewer if the file ends before."""

        def fetch(system: Any) -> bytes:
            data: bytes = system.cat_file(self.url, start=first, end=first + size)
            if len(data) < size and first + len(data) < (system.info(self.url).get("size") or 0):
                raise UnreachableError(f"the answer ended after {len(data):,} of {size:,} bytes")
            return data

        data = self._ask(fetch)
        if len(data) > size:
            raise SourceError("its server ignores byte ranges; serve it by one that knows them")
        return data

    @contextlib.contextmanager
    def open(self, mode: str = "rb") -> Iterator[BufferedReader]:
        """The content as a stream; for reading only."""
        if mode != "rb":
            raise ValueError(f"{self} opens for mode 'rb' only, got {mode!r}")
        with _plain_reason(), open_source(self.url, "") as stream:
            yield cast("BufferedReader", stream)

    def write_from(self, source: Path) -> None:
        """Copy a local file here; it appears whole or not at all, as object stores have it."""
        self._ask(lambda system: system.put_file(str(source), self.url))

    def _ask(self, request: Callable[[Any], _T]) -> _T:
        system = file_system(self.url)

        def once() -> _T:
            system.invalidate_cache()  # fsspec keeps listings, also of what has changed since
            return request(system)

        with _plain_reason():
            return retry_request(once)

    def _split(self) -> tuple[str, str, str]:
        if scheme_of(self.url) in ("http", "https"):
            return self.url.partition("?")
        return self.url, "", ""


DatasetPath = Path | RemotePath
"""A directory or file of a prepared dataset, here or behind a URL."""


def dataset_path(given: str | DatasetPath) -> DatasetPath:
    """`given` as the path it names. file:// is a local path; ConfigError for other schemes."""
    if isinstance(given, RemotePath):
        return given
    local = local_path(str(given)) if not isinstance(given, Path) else str(given)
    return RemotePath(str(given)) if local is None else Path(local)


@contextlib.contextmanager
def _plain_reason() -> Iterator[None]:
    """SourceErrors so that callers may write "cannot be read ({strerror})", as for local files."""
    try:
        yield
    except SourceError as error:
        cause = error.__cause__
        if isinstance(cause, FileNotFoundError):
            raise FileNotFoundError(errno.ENOENT, "no such object") from error
        if isinstance(cause, PermissionError):
            raise PermissionError(errno.EACCES, "access denied; check the credentials") from error
        raise type(error)(error.reason.removeprefix("cannot be read ")) from error
