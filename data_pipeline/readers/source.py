"""What a reader gets (`Source`), and how it reads chunks, lines and raw documents from it.

RAM is bounded: a long line is read in chunks of `CHUNK_BYTES`, and a document longer than
`HELD_BYTES` is decoded and hashed chunk by chunk instead of being held.
"""

import codecs
import hashlib
import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple, Protocol

from data_pipeline.readers.records import (
    HELD_BYTES,
    MAX_RECORD_BYTES,
    BadRecordError,
    BrokenStreamError,
    IdRules,
    Record,
    Reject,
    Utf8Decoder,
)
from data_pipeline.system.sources import reject_reason

CHUNK_BYTES = 2**20
NUL_REASON = (
    "binary: it has a NUL byte. Convert UTF-16 with iconv -f UTF-16 -t UTF-8; if it is text with "
    "NUL, give --format text"
)


class Spill(Protocol):
    """A file that texts are appended to."""

    def tell(self) -> int: ...
    def write(self, data: bytes, /) -> int: ...


@dataclass(slots=True)
class Source:
    """An open stream and the byte range [start, stop) of the records to read."""

    stream: BinaryIO
    """Decompressed and buffered, at its beginning."""
    name: str
    """The name of the file, for messages and for what its suffix says."""
    text_key: str = "text"
    start: int = 0
    stop: float = math.inf
    """Infinity for the last range: a file that has grown is read to its end."""
    lines: int = 0
    """Lines that start in the range. A reader that supports ranges must count them."""
    ids: IdRules | None = None
    """Set if the documents are token ids instead of text."""
    keeps_nul: bool = False
    """Whether NUL bytes are text, not the sign of a binary file."""
    stored_bytes: int = 0
    """Size of the file before decompression; 0 if unknown."""
    path: str = ""
    """The path or URL of the file, for formats that have a second file next to it."""
    next_paths: tuple[str, ...] = ()
    """Files in which the content of this one continues."""
    rereads: bool = False
    """Whether a text can be read again from its place in the stream, so long ones are not held."""
    spill: Spill | None = None
    """Otherwise, where long texts are written; None if they must be held."""

    @property
    def id_rules(self) -> IdRules:
        """`ids` of a kind of file that only holds token ids."""
        assert self.ids
        return self.ids

    def reject(self, line: int, byte: int, reason: str) -> Reject:
        return Reject(self.name, line, byte, reason)


def read_exactly(stream: BinaryIO, num_bytes: int) -> bytes:
    """The next `num_bytes` of the stream, or fewer at its end.

    A size that a damaged or hostile header declares allocates no RAM in advance.
    """
    parts = []
    while num_bytes and (raw := stream.read(min(num_bytes, CHUNK_BYTES))):
        parts.append(raw)
        num_bytes -= len(raw)
    return b"".join(parts)


class Chunk(NamedTuple):
    """About CHUNK_BYTES of a stream or of one line, never cut between CR and LF."""

    offset: int
    line: int
    """Counted from 1 within the range; 0 from `read_chunks`."""
    raw: bytes
    starts_line: bool
    in_range: bool
    """Whether the chunk starts before `source.stop`."""


def read_chunks(source: Source) -> Iterator[Chunk]:
    """The whole stream in chunks, without a byte-order mark at the beginning."""
    offset = 0
    try:
        while raw := source.stream.read(CHUNK_BYTES):
            body = raw if offset else raw.removeprefix(codecs.BOM_UTF8)
            if body:
                yield Chunk(offset + len(raw) - len(body), 0, body, not offset, True)
            offset += len(raw)
    except OSError as error:
        raise BrokenStreamError(0, offset, reject_reason(error)) from error


def read_line_chunks(source: Source, *, past_stop: bool = False) -> Iterator[Chunk]:
    """The lines that start in the range; with `past_stop` also all later lines.

    Yields nothing if no line starts in the range.
    """
    offset, starts_line, line = _seek_first_line(source), True, 0
    if offset >= source.stop:
        return
    # A line that starts in the range is read to its end, also beyond `stop`.
    while past_stop or not starts_line or offset < source.stop:
        raw = _read_line_chunk(source, offset, line + starts_line)
        if not raw:
            return
        line += starts_line
        in_range = offset < source.stop
        if in_range:
            source.lines = line
        body = raw if offset else raw.removeprefix(codecs.BOM_UTF8)
        yield Chunk(offset + len(raw) - len(body), line, body, starts_line, in_range)
        starts_line = raw.endswith(b"\n")
        offset += len(raw)


class LineBlock(NamedTuple):
    """Whole lines of a stream, all of which start in the range."""

    offset: int
    line: int
    """Number of the first line, counted from 1 within the range."""
    raw: bytes
    """Ends with a line break."""


def read_line_blocks(source: Source) -> Iterator[LineBlock | Chunk]:
    """The lines that start in the range, many at a time.

    A line that continues after the bytes of a block is yielded in chunks, as by `read_line_chunks`.
    """
    offset = _seek_first_line(source)
    while offset < source.stop:
        try:  # unlike `read`, `read1` loses nothing before a place that cannot be read
            size = int(min(CHUNK_BYTES, source.stop - offset))
            raw = source.stream.read1(size)  # type: ignore[attr-defined]
        except OSError as error:
            raise BrokenStreamError(source.lines + 1, offset, reject_reason(error)) from error
        if not raw:
            return
        end = raw.rfind(b"\n") + 1
        if end:
            body = raw[:end] if offset else raw[:end].removeprefix(codecs.BOM_UTF8)
            yield LineBlock(offset + end - len(body), source.lines + 1, body)
            source.lines += body.count(b"\n")
        offset += end
        if end < len(raw):
            source.lines += 1
            offset = yield from _read_line(source, offset, raw[end:])


def _read_line(source: Source, offset: int, begun: bytes) -> Generator[Chunk, None, int]:
    """Yield the line that begins with `begun`, which is read. Returns the offset of its end."""
    start, starts_line = offset, True
    while True:
        rest = _read_line_chunk(source, start, source.lines)
        raw = begun + rest  # if `begun` ends with CR, the chunk has the LF too
        body = raw if offset else raw.removeprefix(codecs.BOM_UTF8)
        if body:
            yield Chunk(offset + len(raw) - len(body), source.lines, body, starts_line, True)
        offset, begun, starts_line = offset + len(raw), b"", False
        if not rest or rest.endswith(b"\n"):
            return offset


def _seek_first_line(source: Source) -> int:
    """Seek to the first line that starts at `source.start` or later; returns its offset.

    Returns an offset of at least `source.stop` if no line starts in the range. The search ends
    there: a line longer than many ranges is not read to its end in every one of them.
    """
    if not source.start:
        return 0
    offset = source.start - 1  # the byte before the range ends a line or not
    source.stream.seek(offset)
    while offset < source.stop and (raw := source.stream.readline(CHUNK_BYTES)):
        offset += len(raw)
        if raw.endswith(b"\n"):
            break
    return offset


def _read_line_chunk(source: Source, offset: int, line: int) -> bytes:
    try:
        raw = source.stream.readline(CHUNK_BYTES)
        if raw.endswith(b"\r") and source.stream.peek(1)[:1] == b"\n":  # type: ignore[attr-defined]
            raw += source.stream.read(1)
        return raw
    except OSError as error:
        raise BrokenStreamError(line, offset, reject_reason(error)) from error


class DocumentBuilder:
    """Builds the Record of a document whose text is a byte range of the file, chunk by chunk.

    A text above HELD_BYTES is not held: the record has its hash and place only. The place is in the
    file if `source.rereads`, otherwise in `source.spill`, where the text is written while it is
    read. Without that, it is held.
    """

    def __init__(self, source: Source, offset: int, line: int) -> None:
        self._source, self._offset, self._line = source, offset, line
        self._spill = None if source.rereads else source.spill
        self._spill_offset: int | None = None
        self._size = 0
        self._undecoded: list[bytes] = []
        self._undecoded_bytes = 0
        self._texts: list[str] = []
        self._sha256 = hashlib.sha256()
        self._decoder = Utf8Decoder()
        self._error: BadRecordError | None = None

    @property
    def _is_held(self) -> bool:
        return self._size <= HELD_BYTES or not (self._source.rereads or self._spill)

    def add(self, raw: bytes) -> None:
        if not self._error and not self._source.keeps_nul and b"\0" in raw:
            self._error = BadRecordError(self._size + raw.index(0), NUL_REASON)
        self._size += len(raw)
        if self._is_held and self._size > MAX_RECORD_BYTES:
            self._error = self._error or too_long_error()
        if self._error:
            self._undecoded, self._texts = [], []
            return
        self._undecoded.append(raw)
        self._undecoded_bytes += len(raw)
        if self._undecoded_bytes >= CHUNK_BYTES:
            self._decode()

    def _decode(self, *, final: bool = False) -> None:
        """Hash the new bytes and check that they are UTF-8."""
        raw = b"".join(self._undecoded)
        self._undecoded, self._undecoded_bytes = [], 0
        self._sha256.update(raw)
        try:
            self._texts.append(self._decoder.decode(raw, final=final))
        except BadRecordError as error:
            self._error = error
        if self._spill and not (self._error or self._is_held):
            if self._spill_offset is None:
                self._spill_offset = self._spill.tell()
            self._spill.write("".join(self._texts).encode())
        if self._error or not self._is_held:
            self._texts = []

    def build(self) -> Record | Reject:
        """The document of all chunks that were added."""
        if not self._error:
            self._decode(final=True)
        if self._error:
            at = self._offset + self._error.byte
            return self._source.reject(self._line, at, self._error.reason)
        text = "".join(self._texts) if self._is_held else None
        offset = self._offset if self._spill_offset is None else self._spill_offset
        return Record(text, offset, self._size, self._line, self._sha256.digest())


def too_long_error() -> BadRecordError:
    return BadRecordError(
        0,
        f"longer than {MAX_RECORD_BYTES:,} bytes, the limit for a document that is held in RAM; "
        "text files and arrays of ids may be of any size",
    )
