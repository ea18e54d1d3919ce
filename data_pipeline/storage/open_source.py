"""Open a local file or a URL as one buffered stream of decompressed bytes.

Every failure is an OSError with a readable text: a truncated or damaged gzip or zstd stream, bytes
after its end, a broken connection. The readers of the formats turn it into a BrokenStreamError.
Memory is bounded: it does not grow with the decompressed size or with what a header declares.
"""

import contextlib
import gzip
import io
import os
import stat
import sys
import zlib
from collections.abc import Iterator
from typing import IO, Any, BinaryIO, Literal

if sys.version_info >= (3, 14):
    from compression.zstd import DecompressionParameter, ZstdError, ZstdFile
else:
    from backports.zstd import DecompressionParameter, ZstdError, ZstdFile

from data_pipeline.errors import printable
from data_pipeline.processes.progress import count_bytes
from data_pipeline.storage.source_errors import SourceError, UnreachableError
from data_pipeline.storage.urls import file_system, retry_request, scheme_of

Compression = Literal["", "gz", "zst"]
_URL_BLOCK_BYTES = 8 * 2**20
_MAX_WINDOW_LOG = 27  # 128 MiB: the limit of `zstd -d` without --long


@contextlib.contextmanager
def open_source(path: str, compression: Compression) -> Iterator[BinaryIO]:
    """Open `path` and decompress it. Raises OSError, also while the stream is read.

    The stream is seekable if `path` is not compressed and, for a URL, the server supports ranges.
    A local path must be a regular file.
    """
    with contextlib.ExitStack() as stack:
        raw: BinaryIO
        if scheme_of(path):
            raw = stack.enter_context(_buffered(_UrlStream(path)))
        else:
            # Checked before opening, because opening a pipe blocks until it has a writer.
            if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 - faster for many files
                raise SourceError("not a regular file")
            raw = stack.enter_context(_buffered(_CountedFile(path)))
        if compression == "gz":
            raw = stack.enter_context(_buffered(_open_gzip(raw)))
        elif compression == "zst":
            raw = stack.enter_context(_buffered(_open_zstd(raw)))
        yield raw


class _CountedFile(io.FileIO):
    """A file that reports the bytes read as progress of the current unit of work."""

    def readinto(self, buffer: Any) -> int:
        size = super().readinto(buffer) or 0
        count_bytes(size)
        return size


def _buffered(raw: io.RawIOBase) -> BinaryIO:
    return io.BufferedReader(raw, buffer_size=256 * 2**10)


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
                reason = f"the connection broke: {type(error).__name__}"
                raise UnreachableError(reason) from error
        if not data and len(buffer) and self._size is not None and self._position < self._size:
            raise UnreachableError(f"ended after {self._position:,} of {self._size:,} bytes")
        buffer[: len(data)] = data
        self._position += len(data)
        count_bytes(len(data))
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class _DecompressedStream(io.RawIOBase):
    """The output of a decompressor. Truncated or damaged input is a SourceError.

    A read decompresses at most as many bytes as were requested, regardless of the declared size.
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
            if "requires too much memory" in reason:  # libzstd has no error class for the window
                raise SourceError(
                    f"a zstd frame needs a window of more than {2**_MAX_WINDOW_LOG:,} bytes; "
                    "compress the file again without --long"
                ) from None
            raise SourceError(f"damaged {self._format_name} stream: {reason}") from None
        buffer[: len(data)] = data
        return len(data)


def _open_gzip(raw: BinaryIO) -> _DecompressedStream:
    # GzipFile reads an empty file as an empty stream; the gzip program refuses it.
    if not raw.read(1):
        raise SourceError("truncated gzip stream: the file is empty")
    raw.seek(0)
    return _DecompressedStream(gzip.GzipFile(fileobj=raw), "gzip")


def _open_zstd(raw: BinaryIO) -> _DecompressedStream:
    # Reads all frames and ignores skippable ones (RFC 8878, section 3.1.2). A cut inside a frame
    # raises EOFError; the stream reader of the package zstandard would end there without an error.
    options = {int(DecompressionParameter.window_log_max): _MAX_WINDOW_LOG}
    return _DecompressedStream(ZstdFile(raw, options=options), "zstd")
