"""What a reader gets (`Source`), and how it reads lines and long documents from it.

RAM is bounded: a line longer than MAX_RECORD_BYTES is cut, and a document longer than `HELD_BYTES`
is decoded and hashed chunk by chunk instead of being held.
"""

import codecs
import hashlib
import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

from data_pipeline.readers.input_file import InputFile
from data_pipeline.readers.records import (
    HELD_BYTES,
    MAX_RECORD_BYTES,
    BadRecordError,
    BrokenStreamError,
    IdRules,
    Record,
    Reject,
    Utf8Decoder,
    decode,
)
from data_pipeline.system.sources import reject_reason

CHUNK_BYTES = 2**20
NUL_REASON = (
    "binary: it has a NUL byte. Convert UTF-16 with iconv -f UTF-16 -t UTF-8; if it is text with "
    "NUL, give --format text"
)


@dataclass(slots=True)
class Source:
    """The byte range [start, stop) of a file, from which a reader yields the records."""

    file: InputFile
    text_key: str = "text"
    start: int = 0
    stop: float = math.inf
    """Infinity for the last range: a file that has grown is read to its end."""
    spill: BinaryIO | None = None
    """Where long texts are written that cannot be read again from their place in the file."""
    stream: BinaryIO = field(default_factory=io.BytesIO)
    """Decompressed and buffered, at its beginning."""
    lines: int = 0
    """Lines that start in the range; 0 after an error. A reader that supports ranges must count
    them: line numbers of the file are those of a range plus the lines of all earlier ranges."""

    @property
    def id_rules(self) -> IdRules:
        """The rules of a file that holds token ids."""
        assert self.file.ids
        return self.file.ids

    def reject(self, line: int, byte: int, reason: str) -> Reject:
        return Reject(self.file.name, line, byte, reason)

    def decode(self, raw: bytes) -> str:
        """The text of a record. Raises BadRecordError for NUL and for what is not UTF-8."""
        if not self.file.keeps_nul and b"\0" in raw:
            raise BadRecordError(raw.index(0), NUL_REASON)
        return decode(raw)

    def record(
        self, raw: bytes, text_of: Callable[[bytes], str], *, offset: int, line: int
    ) -> Record | Reject:
        """The document whose text `text_of` finds in the bytes of a record, or why there is none.

        `text_of` raises BadRecordError.
        """
        try:
            if len(raw) > MAX_RECORD_BYTES:
                raise too_long_error()
            return Record.of(text_of(raw), offset=offset, size=len(raw), line=line)
        except BadRecordError as error:
            return self.reject(line, offset + error.byte, error.reason)


def read_exactly(stream: BinaryIO, num_bytes: int) -> bytes:
    """The next `num_bytes` of the stream, or fewer at its end.

    A size that a damaged or hostile header declares allocates no RAM in advance.
    """
    parts = []
    while num_bytes and (raw := stream.read(min(num_bytes, CHUNK_BYTES))):
        parts.append(raw)
        num_bytes -= len(raw)
    return b"".join(parts)


class Line(NamedTuple):
    """A line of a file."""

    offset: int
    number: int
    """Counted from 1 within the range."""
    raw: bytes
    """With its line break. Of a line longer than MAX_RECORD_BYTES, one byte more than that."""


def lines_of(source: Source) -> Iterator[Line]:
    """The lines that start in the range, without a byte-order mark at the beginning of the file."""
    stream, offset = source.stream, 0
    try:
        if source.start:
            offset = source.start - 1  # the byte before the range ends a line or not
            stream.seek(offset)
            # To the first line of the range. The search ends with it: a line longer than many
            # ranges is not read to its end in every one of them.
            while offset < source.stop and (raw := stream.readline(CHUNK_BYTES)):
                offset += len(raw)
                if raw.endswith(b"\n"):
                    break
        while offset < source.stop and (raw := stream.readline(MAX_RECORD_BYTES + 1)):
            begin, end = offset, raw
            offset += len(raw)
            while end and not end.endswith(b"\n"):  # a line that is cut
                end = stream.readline(CHUNK_BYTES)
                offset += len(end)
            if not begin and raw.startswith(codecs.BOM_UTF8):
                begin, raw = len(codecs.BOM_UTF8), raw.removeprefix(codecs.BOM_UTF8)
            source.lines += 1
            yield Line(begin, source.lines, raw)
    except OSError as error:
        raise BrokenStreamError(source.lines + 1, offset, reject_reason(error)) from error


class DocumentBuilder:
    """Builds the Record of a document of any length, chunk by chunk.

    A text above HELD_BYTES is not held: the record has its hash and place only. The place is in the
    file, or in `source.spill` if the file is spilled.
    """

    def __init__(self, source: Source, offset: int, line: int) -> None:
        self._source, self._offset, self._line = source, offset, line
        self._spill = source.spill if source.file.is_spilled else None
        self._spill_offset: int | None = None
        self._size = 0
        self._undecoded = bytearray()
        self._texts: list[str] = []
        self._sha256 = hashlib.sha256()
        self._decoder = Utf8Decoder()
        self._error: BadRecordError | None = None

    def add(self, raw: bytes) -> None:
        """Append a chunk, such as the `raw` of a Line."""
        if len(raw) > MAX_RECORD_BYTES:
            self._error = self._error or too_long_error()
            return
        self._size += len(raw)
        self._undecoded += raw
        if len(self._undecoded) >= CHUNK_BYTES:
            self._decode()

    def _decode(self, *, final: bool = False) -> None:
        """Hash the new bytes and check that they are UTF-8."""
        raw = bytes(self._undecoded)
        self._undecoded.clear()
        if self._error:
            return
        try:
            if not self._source.file.keeps_nul and b"\0" in raw:
                raise BadRecordError(self._size - len(raw) + raw.index(0), NUL_REASON)
            self._texts.append(self._decoder.decode(raw, final=final))
        except BadRecordError as error:
            self._error = error
        self._sha256.update(raw)
        if self._size <= HELD_BYTES:
            return
        if self._spill:
            if self._spill_offset is None:
                self._spill_offset = self._spill.tell()
            self._spill.write("".join(self._texts).encode())
        self._texts = []

    def build(self) -> Record | Reject:
        """The document of all chunks that were added."""
        self._decode(final=True)
        if self._error:
            at = self._offset + self._error.byte
            return self._source.reject(self._line, at, self._error.reason)
        text = "".join(self._texts) if self._size <= HELD_BYTES else None
        offset = self._offset if self._spill_offset is None else self._spill_offset
        return Record(text, offset, self._size, self._line, self._sha256.digest())


def too_long_error() -> BadRecordError:
    return BadRecordError(
        0,
        f"longer than {MAX_RECORD_BYTES:,} bytes, the limit for a document that is held in RAM; "
        "text files and arrays of ids may be of any size",
    )
