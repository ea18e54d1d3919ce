"""The files of the input, what a reader of one gets (`Source`), and what it yields for documents:
a `Record` for a good and a `Reject` for a bad one.

Readers write the text of each document to `Source.texts`, one after another, so that it is read
from the input once. RAM is bounded: a line longer than MAX_RECORD_BYTES is cut, and a
`DocumentBuilder` checks, hashes and writes a document of any length chunk by chunk.
"""

import codecs
import hashlib
import io
import json
import math
import os
import posixpath
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

from data_pipeline.errors import printable
from data_pipeline.system.sources import Compression, open_source, reject_reason

MAX_RECORD_BYTES = 256 * 2**20
"""Size limit of a document that must be held in RAM; a longer one is a Reject.

A decoded str takes up to 4 bytes per character, so a reader needs at most about 1 GiB.
"""
CHUNK_BYTES = 2**20
NUL_REASON = (
    "binary: it has a NUL byte. Convert UTF-16 with iconv -f UTF-16 -t UTF-8; if it is text with "
    "NUL, give --format text, or tar for samples"
)
ARCHIVES = (".zip", ".tar")
"""The suffixes of archives that are read."""
ANY_ARCHIVE = {*ARCHIVES, ".7z", ".rar", ".lz4"}
_COMPRESSIONS: dict[str, Compression] = {
    **{".gz": "gz", ".gzip": "gz", ".zst": "zst", ".zstd": "zst"},
    **{".bz2": "bz2", ".bz": "bz2", ".xz": "xz"},
}
_PACKED_TARS = {".tgz": ".gz", ".tzst": ".zst", ".tbz": ".bz2", ".tbz2": ".bz2", ".txz": ".xz"}


# --- records and rejects --------------------------------------------------------------------------


@dataclass(slots=True)  # frozen would take four times the time, for every document
class Record:
    """A document whose text was written to `Source.texts`: `size` bytes of UTF-8 at `offset`.

    `line` is counted from 1 within the range; 0 means that the document is the whole file.
    """

    offset: int
    size: int
    line: int
    sha256: bytes = field(repr=False)
    """Of the UTF-8 bytes of the text."""
    key: str = ""
    """The name of the document in its file, for the id FILE:key; "" for the id FILE:line."""


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that cannot be used. `byte` is the offset of the problem in the file."""

    file: str
    line: int
    byte: int
    reason: str
    loses_rest: bool = False
    """The rest of the file could not be read either; the number of lost records is unknown."""

    def to_json(self) -> str:
        return json.dumps(
            {
                "file": self.file,
                "line": self.line or None,
                "byte": self.byte,
                "reason": self.reason,
            }
        )

    def __str__(self) -> str:
        place = f"{self.line}:byte {self.byte}" if self.line else f"byte {self.byte}"
        return f"{printable(self.file)}:{place}: {self.reason}"


class BadRecordError(ValueError):
    """One record cannot be used. `byte` is counted from the first byte of the record."""

    def __init__(self, reason: str, *, byte: int = 0) -> None:
        super().__init__(reason)
        self.reason, self.byte = reason, byte


class BrokenStreamError(ValueError):
    """The file cannot be read from `byte` on. Earlier records remain valid.

    `line` is 0 for the last one that the reader counted in `Source.lines`.
    """

    def __init__(self, reason: str, *, line: int = 0, byte: int = 0) -> None:
        super().__init__(reason)
        self.reason, self.line, self.byte = reason, line, byte


@dataclass(frozen=True, slots=True)
class IdRules:
    """The ids that an input of token ids may contain, and how raw arrays store them."""

    vocab_size: int
    end_of_document: int
    dtype: str = ""
    """NumPy name of the integers of a raw file, such as "<u2"; "" if it is not given."""
    padding: int | None = None
    """The id that fills up documents; None if it is not known whether there is one."""

    def unknown(self, id_: object, position: int) -> BadRecordError:
        return BadRecordError(
            f"token id {str(id_)[:40]} at position {position:,} is not in the vocabulary of "
            f"{self.vocab_size} ids, 0 to {self.vocab_size - 1}"
        )


def decode(raw: bytes) -> str:
    """Decode the UTF-8 of a record. Raises BadRecordError with the offset of the first bad byte."""
    if len(raw) > MAX_RECORD_BYTES:
        raise too_long()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(error, error.start) from None


def not_utf8(error: UnicodeDecodeError, byte: int) -> BadRecordError:
    hint = ""
    if not byte and error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        hint = "; it looks like UTF-16: convert it with iconv -f UTF-16 -t UTF-8"
    value = error.object[error.start]
    return BadRecordError(f"invalid UTF-8: byte 0x{value:02x}, {error.reason}{hint}", byte=byte)


def too_long() -> BadRecordError:
    return BadRecordError(
        f"longer than {MAX_RECORD_BYTES:,} bytes, the limit for a document that is held in RAM; "
        "text files and arrays of ids may be larger"
    )


def value_at(key: str, content: object) -> Any:
    """The value at a key of parsed JSON. Raises BadRecordError, which names the keys seen."""
    if not isinstance(content, dict):
        raise BadRecordError(f"not a JSON object but a {type(content).__name__}")
    if key not in content:
        seen = ", ".join(printable(each)[:40] for each in list(content)[:10]) or "none"
        raise BadRecordError(f'no key "{key}"; keys seen: {seen} (see --text-key)')
    return content[key]


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
    """wikitext_rows: files in which the content of this one continues; `size` includes theirs.
    megatron: the index. `mark` includes theirs."""
    archive: str = ""
    """The address of the archive from which `path` was unpacked; `mark` is then that of it."""
    member: str = ""
    """The path in this archive."""
    short_name: str = ""
    """The name that the file would have without the other inputs; "" if it is `name`, or if an
    earlier file has it."""

    @property
    def suffix(self) -> Suffix:
        return suffix_of(self.name)

    @property
    def compression(self) -> Compression:
        return _COMPRESSIONS.get(self.suffix.packed, "")

    @property
    def place(self) -> str:
        """The address for the user: `path`, or that of the member of an archive."""
        return f"{self.archive}/{self.member}" if self.archive else self.path

    def open(self) -> AbstractContextManager[BinaryIO]:
        """The decompressed stream, as `open_source`."""
        return open_source(self.path, self.compression)

    def first_bytes(self, size: int) -> bytes:
        """The first `size` decompressed bytes; fewer if there are fewer or reading fails."""
        with suppress(OSError), self.open() as stream:  # the reader reports the error
            return stream.read(size)
        return b""

    def first_lines(self, size: int) -> list[bytes]:
        """The first two lines that are not blank, cut to `size` bytes; none if reading fails."""
        with suppress(OSError), self.open() as stream:  # the reader reports the error
            lines: Iterator[bytes] = iter(partial(stream.readline, size), b"")
            unmarked = (line.removeprefix(BOM_UTF8) for line in lines)
            return list(islice(filter(bytes.strip, unmarked), 2))
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
    unread: Counter[str] = field(default_factory=Counter)
    """Members of samples that are no text of a document, by their extension."""

    @property
    def id_rules(self) -> IdRules:
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
        self,
        text_of: Callable[[Any], str],
        content: Any,
        *,
        line: int,
        byte: int = 0,
        key: str = "",
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
        self._offset, self._size = source.texts.tell(), 0
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
        if not self._error:
            self._write(final=True)
        if error := self._error:
            return self._source.reject(self._line, self._byte + error.byte, error.reason)
        return Record(self._offset, self._size, self._line, self._sha256.digest())
