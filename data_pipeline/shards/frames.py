"""zstd frames: a compressed stream of which any part can be read without the rest.

The stream consists of independent frames, each with its size and checksum, and ends in the seek
table of zstd's seekable format. Stock tools (`zstd -d`, `tar --zstd`) read it as a whole.

Two checks that zstandard does not make: sizes that frames declare are limited and compared before
decoding (32 KB can declare 1 GiB), and every frame must have the expected checksum.

Source: github.com/facebook/zstd, contrib/seekable_format; RFC 8878 for frames and checksums.
"""

import hashlib
import struct
from collections import deque
from typing import BinaryIO, NamedTuple

import zstandard

from data_pipeline.errors import DataError

MAX_FRAME_BYTES = 16 * 2**20
"""Larger frames are refused before decoding, whatever size a file declares."""
ZSTD_LEVEL = 3

_SKIPPABLE_MAGIC = 0x184D2A5E
_SEEKABLE_MAGIC = 0x8F92EAB1
_ENTRIES_HAVE_CHECKSUMS = 0x80
_CUT_UNIT = 512  # a tar record, so that no token is split between two frames


class Frame(NamedTuple):
    """Offset and size of one frame in the file and in the raw stream, in bytes."""

    compressed_offset: int
    compressed_size: int
    raw_offset: int
    raw_size: int
    checksum: int
    """Low 32 bits of the XXH64 of the raw bytes; the last four bytes of the frame."""


class FrameError(DataError):
    """A frame that does not match the index. The message gives only the cause, not the file."""


class FrameWriter:
    """A writable stream that compresses into frames. RAM is limited to one frame.

    Call `next_unit(size)` before writing `size` bytes that belong together. A frame ends exactly
    at their end; from 1.5 times `frame_bytes` on they are divided evenly into several frames.
    """

    def __init__(self, file: BinaryIO, *, frame_bytes: int) -> None:
        self.frames: list[Frame] = []
        self.num_bytes = 0
        """Compressed bytes written."""
        self.num_raw_bytes = 0
        """Raw bytes received."""
        self.sha256 = hashlib.sha256()
        self.raw_sha256 = hashlib.sha256()
        self._file = file
        self._frame_bytes = frame_bytes
        self._compressor = zstandard.ZstdCompressor(
            level=ZSTD_LEVEL, write_checksum=True, write_content_size=True, write_dict_id=False
        )
        self._buffer = bytearray()
        self._cut_at = 0  # raw offset up to which frames are written
        self._planned: deque[int] = deque()  # raw offsets at which the next frames end
        self._planned_end = 0

    def next_unit(self, size: int) -> None:
        """Announce that the next `size` raw bytes belong together."""
        num_frames = max(1, round(size / self._frame_bytes))
        frame_size = -(-size // (num_frames * _CUT_UNIT)) * _CUT_UNIT
        start, self._planned_end = self._planned_end, self._planned_end + size
        self._planned.extend(range(start + frame_size, self._planned_end, frame_size))
        self._planned.append(self._planned_end)

    def write(self, data: bytes) -> int:
        """Append raw bytes. tarfile calls this, with any block size."""
        self._buffer += data
        self.num_raw_bytes += len(data)
        self.raw_sha256.update(data)
        while self._planned and self._planned[0] <= self.num_raw_bytes:
            self._end_frame(self._planned.popleft())
        return len(data)

    def finish(self) -> None:
        """Write the buffered bytes as the last frame, then the seek table. The file stays open."""
        if self._planned:
            raise ValueError(f"announced up to byte {self._planned_end}, got {self.num_raw_bytes}")
        if self._buffer:
            self._end_frame(self.num_raw_bytes)
        # zstd's seekable format: one skippable frame.
        table = b"".join(
            struct.pack("<III", frame.compressed_size, frame.raw_size, frame.checksum)
            for frame in self.frames
        )
        table += struct.pack("<IBI", len(self.frames), _ENTRIES_HAVE_CHECKSUMS, _SEEKABLE_MAGIC)
        self._emit(struct.pack("<II", _SKIPPABLE_MAGIC, len(table)) + table)

    def abandon(self) -> None:
        """Write no more frames. tarfile flushes its buffer even when it is garbage collected."""
        self._planned.clear()

    def _end_frame(self, raw_end: int) -> None:
        raw_size = raw_end - self._cut_at
        # One call per frame makes it independent: no window reaches into the frame before.
        data = self._compressor.compress(bytes(self._buffer[:raw_size]))
        # RFC 8878, 3.1.1: the checksum is the frame's last four bytes, little-endian.
        checksum = int.from_bytes(data[-4:], "little")
        self.frames.append(Frame(self.num_bytes, len(data), self._cut_at, raw_size, checksum))
        del self._buffer[:raw_size]
        self._cut_at = raw_end
        self._emit(data)

    def _emit(self, data: bytes) -> None:
        self._file.write(data)
        self.sha256.update(data)
        self.num_bytes += len(data)


def compress(data: bytes) -> bytes:
    """One frame with size and checksum, for data that is always read as a whole."""
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True).compress(data)


def decompress(data: bytes, *, limit: int) -> bytes:
    """The inverse of `compress`. Raises FrameError for other bytes, and before decoding if they
    declare more than `limit` bytes, which zstandard would allocate."""
    try:
        header = zstandard.get_frame_parameters(data)
        declared = max(header.content_size, header.window_size)
        if declared > limit:
            raise FrameError(f"it declares {declared:,} bytes, the limit is {limit:,}")
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FrameError(f"zstd cannot decode it: {error}") from error


def decode_frame(data: bytes, frame: Frame) -> bytes:
    """The `frame.raw_size` raw bytes of a frame. Raises FrameError if `data` is not that frame."""
    # Compared before decoding: a valid frame of another shard has another checksum, and so have the
    # last four bytes of a frame that is cut.
    checksum = int.from_bytes(data[-4:], "little")
    if checksum != frame.checksum:
        raise FrameError(f"its checksum is {checksum:#010x}, the index has {frame.checksum:#010x}")
    raw = decompress(data, limit=MAX_FRAME_BYTES)
    if len(raw) != frame.raw_size:
        raise FrameError(f"it has {len(raw):,} raw bytes, the index {frame.raw_size:,}")
    return raw
