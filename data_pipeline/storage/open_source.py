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

from data_pipeline.errors import printable
from data_pipeline.storage.source_errors import SourceError, UnreachableError
from data_pipeline.storage.urls import attempt, file_system, scheme_of

Compression = Literal["", "gz", "zst"]
_URL_BLOCK_BYTES = 8 * 2**20


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
            raw = stack.enter_context(_buffered(_GzipStream(raw)))
        elif compression == "zst":
            raw = stack.enter_context(_buffered(_ZstdStream(raw)))
        yield raw


def _buffered(raw: io.RawIOBase) -> BinaryIO:
    return io.BufferedReader(raw, buffer_size=256 * 2**10)


class _UrlStream(io.RawIOBase):
    def __init__(self, url: str) -> None:
        system = file_system(url)
        self._file: IO[bytes] = attempt(lambda: system.open(url, "rb", block_size=_URL_BLOCK_BYTES))
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
            found = attempt(lambda: self._file.read(len(buffer)))
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


class _GzipStream(io.RawIOBase):
    def __init__(self, raw: BinaryIO) -> None:
        if not raw.read(1):
            raise SourceError("truncated gzip stream: the file is empty")
        raw.seek(0)
        self._file = gzip.GzipFile(fileobj=raw)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            found = self._file.read1(len(buffer))
        except SourceError:
            raise
        except EOFError:
            raise SourceError("truncated gzip stream: it stops before its end mark") from None
        except (OSError, zlib.error) as error:  # BadGzipFile has no errno; a failing disk has one
            if isinstance(error, OSError) and error.errno:
                raise
            raise SourceError(f"damaged gzip stream: {printable(str(error))[:120]}") from None
        buffer[: len(found)] = found
        return len(found)


_ZSTD_MAGIC, _SKIPPABLE_MAGIC = b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18"
_MAX_WINDOW_BYTES = 128 * 2**20  # what `zstd -d` takes without --long


class _ZstdStream(io.RawIOBase):
    """Decompresses block by block: at most 128 KiB come out at once, whatever a frame claims.

    zstandard's own stream ends quietly where a file is cut; the frames are walked here, so the end
    of every one is required.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame: Any = None  # the decompressor of the open frame
        self._has_checksum = False
        self._frames = 0
        self._out = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._out:
            if self._frame is not None:
                self._out = self._next_block()
            elif not self._next_frame():
                return 0
        found, self._out = self._out[: len(buffer)], self._out[len(buffer) :]
        buffer[: len(found)] = found
        return len(found)

    def _next_frame(self) -> bool:
        """Open the next frame; False at the end of the file. Frames of foreign data are skipped."""
        import zstandard

        magic = self._raw.read(4)
        if not magic and self._frames:
            return False
        if len(magic) < 4:
            raise SourceError("truncated zstd stream: it stops before a frame")
        if 0x50 <= magic[0] <= 0x5F and magic[1:] == _SKIPPABLE_MAGIC:
            left = int.from_bytes(self._take(4), "little")
            while left:
                left -= len(self._take(min(left, 2**16)))
        elif magic == _ZSTD_MAGIC:
            ahead = self._raw.read(1)
            try:
                size = _header_size(ahead)
                header = magic + ahead + self._take(size - 5)
                frame = zstandard.get_frame_parameters(header)
                if frame.window_size > _MAX_WINDOW_BYTES:
                    raise SourceError(
                        f"a zstd frame wants a window of {frame.window_size:,} bytes, at most "
                        f"{_MAX_WINDOW_BYTES:,} are given; compress it again without --long"
                    )
                self._has_checksum = frame.has_checksum
                self._frame = zstandard.ZstdDecompressor(
                    max_window_size=_MAX_WINDOW_BYTES
                ).decompressobj()
                self._frame.decompress(header)
            except zstandard.ZstdError as error:
                raise SourceError(f"damaged zstd stream: {printable(str(error))[:120]}") from None
        else:
            what = "something else follows its last frame" if self._frames else "no zstd frame"
            raise SourceError(f"damaged zstd stream: {what}")
        self._frames += 1
        return True

    def _next_block(self) -> bytes:
        import zstandard

        head = self._take(3)
        fields = int.from_bytes(head, "little")
        last, kind, size = fields & 1, fields >> 1 & 3, fields >> 3
        block = head + self._take(1 if kind == 1 else size)  # 1: one byte, `size` times
        if last and self._has_checksum:
            block += self._take(4)
        try:
            out: bytes = self._frame.decompress(block)
        except zstandard.ZstdError as error:
            raise SourceError(f"damaged zstd stream: {printable(str(error))[:120]}") from None
        if last:
            if not self._frame.eof:
                raise SourceError("damaged zstd stream: a frame does not end with its last block")
            self._frame = None
        return out

    def _take(self, size: int) -> bytes:
        found = self._raw.read(size)
        if len(found) < size:
            raise SourceError("truncated zstd stream: it stops inside a frame")
        return found


def _header_size(descriptor: bytes) -> int:
    """Bytes of a frame's header with its magic, by the descriptor byte behind that."""
    if not descriptor:
        raise SourceError("truncated zstd stream: it stops inside a frame")
    flags = descriptor[0]
    single_segment, dictionary, content = flags >> 5 & 1, flags & 3, flags >> 6
    content_bytes = (single_segment, 2, 4, 8)[content]
    return 5 + (1 - single_segment) + (0, 1, 2, 4)[dictionary] + content_bytes
