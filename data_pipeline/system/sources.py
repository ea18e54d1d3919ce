"""Read local files and URLs: as one stream of decompressed bytes, with retries for object stores.

Every failure of a stream is an OSError with a readable text: a truncated or damaged compressed
stream, bytes after its end, a decompression bomb, a broken connection. The RAM of a stream is
bounded: it does not grow with the decompressed size or with what a header declares.

The bytes that are read are counted, as the progress of the current unit of work.
"""

import bz2
import contextlib
import errno
import gzip
import io
import lzma
import os
import re
import stat
import sys
import time
import types
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, BinaryIO, Literal, TypeVar

from data_pipeline.errors import ConfigError, printable

if sys.version_info >= (3, 14):
    from compression.zstd import DecompressionParameter, ZstdError, ZstdFile
else:
    from backports.zstd import DecompressionParameter, ZstdError, ZstdFile

SCHEMES = ("file", "s3", "gs", "http", "https")
_SCHEME = re.compile(r"([^/]*?)://")
_EXTRAS = {"s3": "s3", "gs": "gcs", "http": "http", "https": "http"}
_MAX_ATTEMPTS = 3
_S3_ATTEMPTS = 2
_FIRST_WAIT_SECONDS = 0.5
_CERTAIN = (
    (FileNotFoundError, errno.ENOENT, "no such object"),
    (PermissionError, errno.EACCES, "access denied; check the credentials"),
    (IsADirectoryError, errno.EISDIR, "is a folder"),
)
"""Failures of requests to object stores that another attempt does not change."""
_T = TypeVar("_T")
Compression = Literal["", "gz", "zst", "bz2", "xz"]
_URL_BLOCK_BYTES = 8 * 2**20
_MAX_WINDOW_LOG = 27  # 128 MiB: the limit of `zstd -d` without --long
_MAX_XZ_BYTES = 192 * 2**20
"""RAM of an xz decoder. `xz -9` needs 65 MiB; dictionaries of more than 128 MiB are refused."""
_BUFFER_BYTES = 256 * 2**10
MAX_RATIO = 1000
"""Decompressed bytes per stored byte. Text has 3 to 10, very repetitive text 100."""
MIN_BYTES = 256 * 2**20
"""Files that expand to less are always accepted."""


def is_url(address: str) -> bool:
    """Whether `address` is a URL of any scheme, not a path."""
    return _SCHEME.match(address) is not None


def scheme_of(address: str) -> str:
    """The scheme of a URL, "" for a local path. Raises ConfigError for an unsupported scheme."""
    scheme = _SCHEME.match(address)
    if not scheme:
        return ""
    if scheme[1].lower() not in SCHEMES:
        raise ConfigError(
            f"{shown(address)}: URLs of scheme {printable(scheme[1])!r} are not supported; valid "
            f"are {', '.join(SCHEMES)}, and paths. Copy the data to one of these."
        )
    return scheme[1].lower()


def local_path(address: str) -> str | None:
    """The path of a local address or a file:// URL; None for any other URL."""
    scheme = scheme_of(address)
    if scheme == "file":
        path = address.partition("://")[2]
        if not path.startswith("/"):
            raise ConfigError(f"{shown(address)}: write file:// and an absolute path: file:///a/b")
        return path
    return None if scheme else address


def shown(path: str) -> str:
    """A path or URL for a message: without password and query, control characters escaped."""
    if "://" in path:
        path = re.sub(r"://[^/@]*@", "://", path).partition("?")[0]
    return printable(path)


def file_system(url: str) -> Any:
    """fsspec's file system for a URL. Raises ConfigError with the extra that must be installed."""
    import fsspec

    scheme = scheme_of(url)
    try:
        # Without a cache of listings, which may be outdated.
        system = fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError as error:
        raise ConfigError(
            f"{shown(url)}: reading {scheme}:// needs a package that is not installed ({error}). "
            f"Install it: pip install 'txl-dist[{_EXTRAS[scheme]}]'"
        ) from error
    if scheme == "s3":
        # s3fs repeats what botocore has repeated, with 15 s per attempt: a store that accepts
        # connections and never responds took 20 minutes to be reported.
        system.retries = min(system.retries, _S3_ATTEMPTS)
    return system


def retry_request(request: Callable[[], _T]) -> _T:
    """The result of a request to an object store. The waits between attempts double.

    Raises the errors of `_CERTAIN` without a retry, UnreachableError when the last attempt fails.
    """
    # A loop, not the package tenacity: with it this function is longer, and the import takes 40 ms.
    for attempt in range(_MAX_ATTEMPTS):
        if attempt:
            time.sleep(_FIRST_WAIT_SECONDS * 2 ** (attempt - 1))
        try:
            return request()
        except Exception as error:  # every client library has its own error classes
            last_error = _hidden_failure(error) or error
            for kind, number, reason in _CERTAIN:
                if isinstance(last_error, kind):
                    raise kind(number, reason) from error
    # Messages of clients have the complete URL.
    text = re.sub(r"\w+://\S+", lambda url: shown(url[0]), str(last_error))
    reason = printable(text)[:200] or type(last_error).__name__
    raise UnreachableError(f"{_MAX_ATTEMPTS} attempts failed: {reason}") from last_error


def _hidden_failure(error: Exception) -> Exception | None:
    """What fsspec's HTTP client calls "not found", whatever it is; None for what is not there."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or not isinstance(cause, Exception):
        return None
    is_http = isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp")
    status = getattr(cause, "status", None)
    if status in (401, 403):
        return PermissionError()
    return cause if is_http and status not in (404, 410) else None


class SourceError(OSError):
    """A stream that cannot be read any further. `strerror` is the text for the user."""

    def __init__(self, reason: str) -> None:
        super().__init__(None, reason)


class UnreachableError(SourceError):
    """The network or the server failed. A later attempt may succeed."""


def is_transient(error: BaseException | None) -> bool:
    """Whether a disk or server that may work later has failed, not the file itself."""
    for each in _chain(error):
        if isinstance(each, SourceError):
            return isinstance(each, UnreachableError)
        if isinstance(each, FileNotFoundError | PermissionError | IsADirectoryError):
            return False
        # The OSErrors that libraries raise for damaged content have no errno.
        if isinstance(each, OSError) and each.errno:
            return each.errno != errno.EINVAL  # a damaged Parquet file seeks before its start
    return False


def is_read_failure(error: BaseException | None) -> bool:
    """Whether `error` or one of its causes is a failure to read, so the content is unknown.

    False for a missing file and for a folder with its name: those are certain.
    """
    missing = FileNotFoundError | IsADirectoryError | NotADirectoryError
    first = next((each for each in _chain(error) if isinstance(each, OSError)), None)
    return first is not None and not isinstance(first, missing)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """`error`, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def reject_reason(error: OSError) -> str:
    """The text of an OSError, for `Reject.reason`."""
    reason = error.strerror or type(error).__name__
    return reason if isinstance(error, SourceError) else f"cannot be read: {reason}"


@contextlib.contextmanager
def open_source(path: str, compression: Compression) -> Iterator[BinaryIO]:
    """Open `path` and decompress it. Raises OSError, also while the stream is read.

    The stream is seekable if `path` is not compressed and, for a URL, the server supports ranges.
    A local path must be a regular file.
    """
    is_local = not scheme_of(path)
    # Checked before opening, because opening a pipe blocks until it has a writer.
    if is_local and not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 - faster for many files
        raise SourceError("not a regular file")
    raw = _CountedFile(path) if is_local else _UrlStream(path)
    with io.BufferedReader(raw, _BUFFER_BYTES) as file, decompressed(file, compression) as stream:
        yield stream


@contextlib.contextmanager
def decompressed(raw: BinaryIO, compression: Compression) -> Iterator[BinaryIO]:
    """The decompressed stream of an open one; `raw` itself if it is not compressed."""
    if not compression:
        yield raw
        return
    name = {"gz": "gzip", "zst": "zstd"}.get(compression, compression)
    # gzip, bz2 and zstd modules read an empty file as an empty stream; their programs refuse it.
    if not raw.peek(1):  # type: ignore[attr-defined]
        raise SourceError(f"truncated {name} stream: the file is empty")
    file: Any
    if compression == "gz":
        file = gzip.GzipFile(fileobj=raw)
    elif compression == "zst":
        # Reads all frames and ignores skippable ones (RFC 8878, section 3.1.2). A cut inside a
        # frame raises EOFError; the package zstandard would end there without an error.
        file = ZstdFile(raw, options={int(DecompressionParameter.window_log_max): _MAX_WINDOW_LOG})
    elif compression == "bz2":
        file = _JoinedStreams(raw, bz2.BZ2Decompressor)
    else:
        file = _JoinedStreams(
            raw, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_XZ_BYTES)
        )
    # A line of a gigabyte of equal characters is legitimate in the formats of corpora, gz and zst.
    # gzip cannot expand more than 1,032 times; zstd can, but needs no more RAM for it.
    has_limit = compression in ("bz2", "xz")
    plain = DecompressedStream(file, name, raw.tell if has_limit else None)
    with io.BufferedReader(plain, _BUFFER_BYTES) as stream:
        yield stream


class _JoinedStreams:
    """The streams of a .bz2 or .xz file, one after another.

    `bz2.BZ2File` and `lzma.LZMAFile` ignore data after the last stream, and the second has no limit
    of RAM.
    """

    def __init__(
        self, raw: BinaryIO, start: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]
    ) -> None:
        self._raw, self._start = raw, start
        self._decoder = start()

    def read1(self, size: int, /) -> bytes:
        while True:
            new = b""
            if self._decoder.eof:
                new = self._decoder.unused_data
                # xz streams may be padded with zeros.
                while not (new := new.lstrip(b"\0")):
                    if not (new := self._raw.read(_BUFFER_BYTES)):
                        return b""
                self._decoder = self._start()
            elif self._decoder.needs_input and not (new := self._raw.read(_BUFFER_BYTES)):
                raise EOFError
            if data := self._decoder.decompress(new, size):
                return data


class _CountedFile(io.FileIO):
    """A file that reports the bytes read as progress of the current unit of work."""

    def readinto(self, buffer: Any) -> int:
        size = super().readinto(buffer) or 0
        count_bytes(size)
        return size


class _UrlStream(io.RawIOBase):
    """A file of fsspec, with retries. An early end is an UnreachableError, not an end of file."""

    def __init__(self, url: str) -> None:
        system = file_system(url)
        self._file: IO[bytes] = retry_request(
            lambda: system.open(url, "rb", block_size=_URL_BLOCK_BYTES)
        )
        self._size: int | None = getattr(self._file, "size", None)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = self._file.seek(offset, whence)
        return self._position

    def readinto(self, buffer: Any) -> int:
        # fsspec's seekable files keep their position when a fetch fails, so the read can be
        # retried. A stream without ranges cannot be continued.
        if self.seekable():
            data = retry_request(lambda: self._file.read(len(buffer)))
        else:
            try:
                data = self._file.read(len(buffer))
            except Exception as error:
                raise UnreachableError(f"the connection broke: {type(error).__name__}") from error
        if not data and len(buffer) and self._size is not None and self._position < self._size:
            raise UnreachableError(f"ended after {self._position:,} of {self._size:,} bytes")
        buffer[: len(data)] = data
        self._position += len(data)
        count_bytes(len(data))
        return len(data)

    def close(self) -> None:
        # The destructor calls this also for a URL that could not be opened.
        if not self.closed and hasattr(self, "_file"):
            self._file.close()
        super().close()


class DecompressedStream(io.RawIOBase):
    """The output of a decompressor, which has `read1`. Bad or exploding input is a SourceError.

    A read decompresses at most as many bytes as were requested, regardless of the declared size.
    `num_stored` returns the compressed bytes that were read so far; None: no limit of expansion.
    """

    def __init__(
        self, file: Any, format_name: str, num_stored: Callable[[], int] | None = None
    ) -> None:
        self._file, self._format_name, self._num_stored = file, format_name, num_stored
        self._size = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        """The bytes read so far."""
        return self._size

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read1(len(buffer))
        except SourceError:
            raise
        except EOFError:
            raise SourceError(f"truncated {self._format_name} stream: no end mark") from None
        except (OSError, zlib.error, lzma.LZMAError, ZstdError) as error:
            # BadGzipFile is an OSError without errno; the error of a failing disk has one.
            if isinstance(error, OSError) and error.errno:
                raise
            reason = printable(str(error))[:120]
            raise SourceError(f"damaged {self._format_name} stream: {reason}") from None
        self._size += len(data)
        if self._size > MIN_BYTES and self._num_stored:
            require_plausible_ratio(self._size, self._num_stored())
        buffer[: len(data)] = data
        return len(data)


def require_plausible_ratio(num_bytes: int, stored_bytes: int) -> None:
    """Raise SourceError if `stored_bytes` cannot expand to `num_bytes` of text."""
    if num_bytes > MIN_BYTES and num_bytes > MAX_RATIO * stored_bytes:
        raise SourceError(
            f"it expands to {num_bytes:,} bytes or more, over {MAX_RATIO:,} times its "
            f"{stored_bytes:,}: refused as a decompression bomb"
        )


# --- progress -------------------------------------------------------------------------------------

_counter: Any = None
"""Has the bytes of the unit that this process is working on as its `value`. None: no unit."""


def count_bytes(num_bytes: int) -> None:
    """Count bytes of the current unit of work, such as one document of many gigabytes."""
    if _counter is not None:
        _counter.value += num_bytes


@contextlib.contextmanager
def counting_bytes(counter: Any = None) -> Iterator[None]:
    """Count the bytes of a unit, in `counter.value` if it is given."""
    global _counter  # noqa: PLW0603 - one unit per process at a time
    _counter = types.SimpleNamespace(value=0) if counter is None else counter
    try:
        yield
    finally:
        _counter = None


def counted_bytes() -> int:
    """The bytes counted in the current unit of this process; 0 if there is none."""
    return getattr(_counter, "value", 0)
