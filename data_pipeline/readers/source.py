"""A file of the input, and what a reader of it gets (`Source`) to read lines and long documents.

Readers write the text of each document to `Source.texts`, one after another, so that it is read
from the input once. RAM is bounded: a line longer than MAX_RECORD_BYTES is cut, and a
`DocumentBuilder` checks, hashes and writes a document of any length chunk by chunk.
"""

import codecs
import hashlib
import io
import math
import os
import posixpath
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import BinaryIO, NamedTuple, TypeVar

from data_pipeline.readers.records import (
    MAX_RECORD_BYTES,
    BadRecordError,
    BrokenStreamError,
    IdRules,
    Record,
    Reject,
    decode,
    not_utf8,
    too_long,
)
from data_pipeline.system.sources import Compression, open_source, reject_reason

CHUNK_BYTES = 2**20
NUL_REASON = (
    "binary: it has a NUL byte. Convert UTF-16 with iconv -f UTF-16 -t UTF-8; if it is text with "
    "NUL, give --format text"
)
ARCHIVES = (".zip", ".tar")
"""The suffixes of archives that are read."""
ANY_ARCHIVE = {*ARCHIVES, ".7z", ".rar", ".lz4"}
_COMPRESSIONS: dict[str, Compression] = {
    **{".gz": "gz", ".gzip": "gz", ".zst": "zst", ".zstd": "zst"},
    **{".bz2": "bz2", ".bz": "bz2", ".xz": "xz"},
}
_PACKED_TARS = {".tgz": ".gz", ".tzst": ".zst", ".tbz": ".bz2", ".tbz2": ".bz2", ".txz": ".xz"}
_T = TypeVar("_T")


# --- files ----------------------------------------------------------------------------------------


class Suffix(NamedTuple):
    """The suffix of a file name in lower case, split at the compression."""

    name: str
    """The suffix without that of the compression."""
    packed: str
    """The suffix of the compression, or an empty string."""

    def __str__(self) -> str:
        return self.name + self.packed or "without suffix"


def suffix_of(name: str) -> Suffix:
    stem, last = posixpath.splitext(name.lower())
    if last in _PACKED_TARS:
        return Suffix(".tar", _PACKED_TARS[last])
    if last in _COMPRESSIONS:
        return Suffix(posixpath.splitext(stem)[1], last)
    return Suffix(last, "")


def mark_of(*paths: str) -> str:
    """The version mark of local files: their sizes and modification times. Raises OSError."""
    statuses = [os.stat(path) for path in paths]  # noqa: PTH116 - faster for many files
    return " ".join(f"{status.st_size} {status.st_mtime_ns}" for status in statuses)


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file to read."""

    path: str
    """A local path or a URL."""
    name: str
    """The path relative to the input folder, always valid UTF-8."""
    size: int = 0
    """Stored bytes when the file was listed; 0 if unknown."""
    mark: str = ""
    """A version mark: that of `mark_of`, or the entity tag. "" if the file system has none."""
    kind: str = ""
    """A key of FORMATS, or of ID_FORMATS for files of token ids; "" until it is decided."""
    ids: IdRules | None = None
    """Set if the documents are token ids instead of text."""
    split: str = ""
    """The split that the input gives to the file (`split_names.py`); "" if it gives none."""
    keeps_nul: bool = False
    """Whether NUL bytes are text (`--format text`), not the sign of a binary file."""
    next_paths: tuple[str, ...] = ()
    """wikitext_rows: files in which the content of this one continues; `size` and `mark` include
    theirs."""
    archive: str = ""
    """The address of the archive from which `path` was unpacked; `mark` is then that of it."""
    member: str = ""
    """The path in this archive."""

    @property
    def suffix(self) -> Suffix:
        return suffix_of(self.name)

    @property
    def compression(self) -> Compression:
        return _COMPRESSIONS.get(self.suffix.packed, "")

    @property
    def paths(self) -> tuple[str, ...]:
        """All files that are read for this one; `mark` is of all."""
        return (self.path, *self.next_paths)

    @property
    def place(self) -> str:
        """The address for the user: `path`, or that of the member of an archive."""
        return f"{self.archive}/{self.member}" if self.archive else self.path

    def open(self) -> AbstractContextManager[BinaryIO]:
        """The decompressed stream, as `open_source`."""
        return open_source(self.path, self.compression)

    def first_bytes(self, size: int) -> bytes:
        """The first `size` decompressed bytes; fewer if there are fewer or reading fails."""
        try:
            with self.open() as stream:
                return stream.read(size)
        except OSError:  # the reader reports it
            return b""

    def first_lines(self, size: int) -> list[bytes]:
        """The first two lines that are not blank, cut to `size` bytes; none if reading fails."""
        try:
            with self.open() as stream:
                lines: Iterator[bytes] = iter(lambda: stream.readline(size), b"")
                unmarked = (line.removeprefix(BOM_UTF8) for line in lines)
                return list(islice((line for line in unmarked if line.strip()), 2))
        except OSError:  # the reader reports the error
            return []


# --- reading --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Source:
    """The byte range [start, stop) of a file, from which a reader yields the records."""

    file: InputFile
    text_key: str = "text"
    start: int = 0
    stop: float = math.inf
    """Infinity for the last range."""
    texts: BinaryIO = field(default_factory=io.BytesIO)
    """Where the texts of the documents are written, one after another."""
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
        self.require_no_nul(raw, 0)
        return decode(raw)

    def require_no_nul(self, raw: bytes, byte: int) -> None:
        """Raise BadRecordError if `raw`, the bytes of a record from `byte` on, is not text."""
        if not self.file.keeps_nul and b"\0" in raw:
            raise BadRecordError(NUL_REASON, byte=byte + raw.index(0))

    def record(
        self, text_of: Callable[[_T], str], content: _T, *, line: int, byte: int = 0, key: str = ""
    ) -> Record | Reject:
        """The document with the text of `content`, which begins at `byte`, or why there is none.

        `text_of` raises BadRecordError.
        """
        try:
            raw = text_of(content).encode()
            if len(raw) > MAX_RECORD_BYTES:
                raise too_long()
        except BadRecordError as error:
            return self.reject(line, byte + error.byte, error.reason)
        offset = self.texts.tell()
        self.texts.write(raw)
        return Record(offset, len(raw), line, hashlib.sha256(raw).digest(), key)


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
            if not begin and raw.startswith(BOM_UTF8):
                begin, raw = len(BOM_UTF8), raw.removeprefix(BOM_UTF8)
            source.lines += 1
            yield Line(begin, source.lines, raw)
    except OSError as error:
        raise BrokenStreamError(reject_reason(error), line=source.lines + 1, byte=offset) from error


class DocumentBuilder:
    """Builds the Record of a document of any length, chunk by chunk. Finish one, then begin one.

    The document begins at `byte` of the file.
    """

    def __init__(self, source: Source, byte: int, line: int) -> None:
        self._source, self._byte, self._line = source, byte, line
        self._offset = source.texts.tell()
        self._size = 0
        self._pending = bytearray()
        self._sha256 = hashlib.sha256()
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._error: BadRecordError | None = None

    def add(self, raw: bytes) -> None:
        """Append a chunk, such as the `raw` of a Line."""
        if len(raw) > MAX_RECORD_BYTES:
            self._error = self._error or too_long()
        if self._error:
            return
        self._pending += raw
        if len(self._pending) >= CHUNK_BYTES:
            self._write()

    def _write(self, *, final: bool = False) -> None:
        """Check, hash and write the pending bytes."""
        raw, cut = bytes(self._pending), len(self._decoder.getstate()[0])
        self._pending.clear()
        try:
            self._source.require_no_nul(raw, self._size)
            self._decoder.decode(raw, final)
        except UnicodeDecodeError as error:
            self._error = not_utf8(error, self._size - cut + error.start)
        except BadRecordError as error:
            self._error = error
        self._sha256.update(raw)
        self._size += self._source.texts.write(raw)

    def build(self) -> Record | Reject:
        """The document of all chunks that were added."""
        if not self._error:
            self._write(final=True)
        if self._error:
            byte = self._byte + self._error.byte
            return self._source.reject(self._line, byte, self._error.reason)
        return Record(self._offset, self._size, self._line, self._sha256.digest())
