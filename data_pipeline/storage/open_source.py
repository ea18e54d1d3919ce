"""Opening: local files and URLs, decompressed, as one buffered stream of bytes.

Whatever goes wrong below comes out as an OSError whose text is for people: gzip and zstd streams
that end too early, are damaged or have something behind them, and object stores that fail. The
formats know nothing of any of this. Nothing here grows with what a file claims or unpacks to.

Source: RFC 8878 for zstd frames; gzip by the standard library, URLs by fsspec.
"""

import contextlib
import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from typing import IO, Any, BinaryIO, Literal

from backports.zstd import DecompressionParameter, ZstdError, ZstdFile

from data_pipeline.errors import printable
from data_pipeline.storage.source_errors import SourceError, UnreachableError
from data_pipeline.storage.urls import file_system, retry_request, scheme_of

Compression = Literal["", "gz", "zst"]
_URL_BLOCK_BYTES = 8 * 2**20
_MAX_WINDOW_LOG = 27  # 128 MiB: the limit of `zstd -d` without --long
_MAX_WINDOW_BYTES = 2**_MAX_WINDOW_LOG


@contextlib.contextmanager
def open_source(path: str, compression: Compression) -> Iterator[BinaryIO]:
    """The bytes of a file or URL, decompressed. Raises OSError, here and while it is read.

    Seekable unless compressed (a URL: if its server can). Not for pipes and devices: `path` is
    refused unless it is a regular file.
    """
    with contextlib.ExitStack() as stack:
        raw: BinaryIO
        if scheme_of(path):
            raw = stack.enter_context(_buffered(_UrlStream(path)))
        else:
            # Looked at before it is opened, for opening a pipe waits for its writer.
            if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 - there may be millions
                raise SourceError("not a regular file")
            raw = stack.enter_context(open(path, "rb"))  # noqa: PTH123
        if compression == "gz":
            raw = stack.enter_context(_buffered(_open_gzip(raw)))
        elif compression == "zst":
            raw = stack.enter_context(_buffered(_open_zstd(raw)))
        yield raw


def _buffered(raw: io.RawIOBase) -> BinaryIO:
    return io.BufferedReader(raw, buffer_size=256 * 2**10)


class _UrlStream(io.RawIOBase):
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
        # A seekable file has not moved when a fetch fails, so it may be tried again; a plain
        # stream has lost its place.
        if self.seekable():
            found = retry_request(lambda: self._file.read(len(buffer)))
        else:
            try:
                found = self._file.read(len(buffer))
            except Exception as error:
                broke = f"the connection broke: {type(error).__name__}"
                raise UnreachableError(broke) from error
        if not found and len(buffer) and self._size is not None and self._position < self._size:
            raise UnreachableError(f"ended after {self._position:,} of {self._size:,} bytes")
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class _DecompressedStream(io.RawIOBase):
    """The output of a decompressor. A truncated or damaged input is a SourceError.

    A read returns at most as many bytes as were requested, whatever size a header declares.
    """

    def __init__(self, file: gzip.GzipFile | ZstdFile, format_name: str) -> None:
        self._file, self._format_name = file, format_name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read1(len(buffer))
        except SourceError:
            raise
        except EOFError:
            raise SourceError(f"truncated {self._format_name} stream: no end mark") from None
        except (OSError, zlib.error, ZstdError) as error:
            # BadGzipFile is an OSError without errno; the error of a failing disk has one.
            if isinstance(error, OSError) and error.errno:
                raise
            reason = printable(str(error))[:120]
            if "requires too much memory" in reason:  # libzstd's words; it has no error type for it
                reason = (
                    f"a zstd frame needs a window of more than {_MAX_WINDOW_BYTES:,} bytes; "
                    "compress the file again without --long"
                )
                raise SourceError(reason) from None
            raise SourceError(f"damaged {self._format_name} stream: {reason}") from None
        buffer[: len(data)] = data
        return len(data)


def _open_gzip(raw: BinaryIO) -> _DecompressedStream:
    # GzipFile reads an empty file as a stream without members; the gzip program refuses it.
    if not raw.read(1):
        raise SourceError("truncated gzip stream: the file is empty")
    raw.seek(0)
    return _DecompressedStream(gzip.GzipFile(fileobj=raw), "gzip")


def _open_zstd(raw: BinaryIO) -> _DecompressedStream:
    # Reads frame after frame and skips skippable frames (RFC 8878, section 3.1.2). Raises EOFError
    # for a cut inside a frame, where the stream reader of the package zstandard ends silently.
    options = {int(DecompressionParameter.window_log_max): _MAX_WINDOW_LOG}
    return _DecompressedStream(ZstdFile(raw, options=options), "zstd")
