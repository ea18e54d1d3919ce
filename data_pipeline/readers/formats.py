"""The formats, and reading a file by its own: records of a range, one record again, or its pieces.

A format is one function over a `Source` and one line in `FORMATS`
(docs/how_to/add_a_reader.md). Finding the files is `find.py`'s business, opening them
`sources.py`'s.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from data_pipeline.errors import UnfinishedError
from data_pipeline.readers.jsonl import read_jsonl, text_of_line
from data_pipeline.readers.lines import read_lines
from data_pipeline.readers.parquet import read_parquet
from data_pipeline.readers.records import (
    BadRecordError,
    BrokenStreamError,
    Record,
    Reject,
    Utf8Decoder,
    decode,
)
from data_pipeline.readers.spans import PIECE_BYTES, Source
from data_pipeline.readers.text import read_text
from data_pipeline.readers.wikitext import read_wikitext
from data_pipeline.storage.open_source import Compression, open_source
from data_pipeline.storage.source_errors import SourceError, explain, is_passing
from data_pipeline.storage.urls import scheme_of, shown

Kind = str
"""A key of FORMATS."""
Format = str
"""A kind, or "auto": each file's own, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """How files of one kind are read, and what else may be done with them."""

    read: Callable[[Source], Iterator[Record | Reject]]
    suffixes: tuple[str, ...] = ()
    """Of the files that `auto` reads so, and the only ones taken from a folder by --format."""
    again: Callable[[bytes, str], str] | None = None
    """(the bytes at a record's place, text key) -> its text; None: the place does not say that."""
    by_range: bool = False
    """Whether `read` keeps to `start` and `stop` of the source and counts its lines."""


def _as_it_is(raw: bytes, _text_key: str) -> str:
    return decode(raw)


FORMATS: dict[Kind, FileFormat] = {
    "text": FileFormat(read=read_text, again=_as_it_is),
    "lines": FileFormat(read=read_lines, again=_as_it_is, by_range=True),
    "jsonl": FileFormat(
        read=read_jsonl, suffixes=(".jsonl", ".ndjson", ".json"), again=text_of_line, by_range=True
    ),
    "parquet": FileFormat(read=read_parquet, suffixes=(".parquet", ".pq")),
    "wikitext": FileFormat(read=read_wikitext, again=_as_it_is, by_range=True),
}


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file to read. `name` is its path relative to the input it was found in, always UTF-8."""

    path: str
    """A local path, or a URL."""
    name: str
    kind: Kind
    compression: Compression
    size: int
    """Bytes as stored when it was found; 0 when unknown."""
    mark: str = ""
    """Differs when the content was changed, as far as can be seen without reading it."""

    @property
    def rereadable(self) -> bool:
        """Whether a record can be read again from its offset and size alone."""
        local = not self.compression and not scheme_of(self.path)
        return local and FORMATS[self.kind].again is not None

    @property
    def holds_plain_texts(self) -> bool:
        """Whether the bytes at a record's place are its text in UTF-8."""
        return self.rereadable and FORMATS[self.kind].again is _as_it_is


def scan_ranges(file: InputFile, unit_bytes: int) -> list[tuple[int, int]]:
    """The byte ranges [start, stop) that may be read apart, in order; at least one.

    A record belongs to the range that its first byte is in. What cannot be cut is one range.
    """
    if unit_bytes < 1:
        raise ValueError(f"unit_bytes={unit_bytes} must be at least 1")
    if not file.rereadable or not FORMATS[file.kind].by_range or not file.size:
        return [(0, file.size)]
    starts = range(0, file.size, unit_bytes)
    return [(start, min(start + unit_bytes, file.size)) for start in starts]


@dataclass(slots=True)
class Reading:
    """Iterate to get the records of one range, in order; what cannot be used is a Reject.

    Raises UnfinishedError where a disk or server fails that may be well another time.
    """

    file: InputFile
    text_key: str
    start: int
    stop: int
    lines: int = 0
    """Once read to the end: the lines that begin in the range. Add those of the ranges before to
    the `line` of a record or Reject, unless that is 0."""

    def __iter__(self) -> Iterator[Record | Reject]:
        file = self.file
        try:
            _require_no_less(file)
            with open_source(file.path, file.compression) as stream:
                source = Source(
                    file.name,
                    stream,
                    self.start,
                    math.inf if self.stop >= file.size else self.stop,
                    self.text_key,
                    file.rereadable,
                )
                yield from FORMATS[file.kind].read(source)
                self.lines = source.lines
        except (BrokenStreamError, OSError) as error:
            yield self._broken(error)

    def _broken(self, error: BrokenStreamError | OSError) -> Reject:
        file = self.file
        reason = explain(error) if isinstance(error, OSError) else error.reason
        if is_passing(error):
            raise UnfinishedError(
                f"{shown(file.path)}: {reason}. Finished work is kept; when the disk or network is "
                "well, the same command goes on from it."
            ) from error
        if isinstance(error, OSError):
            return Reject(file.name, 0, 0, reason, loses_rest=True)
        return Reject(file.name, error.line, error.byte, reason, loses_rest=True)


def read_records(file: InputFile, text_key: str, start: int, stop: int) -> Reading:
    """The records whose first byte is in [start, stop), one of `scan_ranges(file, ...)`."""
    return Reading(file, text_key, start, stop)


def _require_no_less(file: InputFile) -> None:
    """A file that lost bytes since it was found would lose records without a word."""
    if not scheme_of(file.path):
        now = os.stat(file.path).st_size  # noqa: PTH116 - once a file, and there may be millions
        if now < file.size:
            raise SourceError(f"it had {file.size:,} bytes when it was found and has {now:,} now")


def read_again(file: InputFile, text_key: str, place: tuple[int, int, int]) -> str:
    """The text of the record at `place`, its offset, size and line, in a rereadable file.

    Raises OSError or ValueError when there is none now.
    """
    again = FORMATS[file.kind].again
    if not file.rereadable or again is None:
        raise ValueError(f"{file.name} cannot be read again from the middle")
    offset, size, _ = place
    with open(file.path, "rb") as stream:  # noqa: PTH123 - once a document
        stream.seek(offset)
        return again(stream.read(size), text_key)


def read_pieces(
    file: InputFile,
    place: tuple[int, int, int],
    *,
    piece_bytes: int = PIECE_BYTES,
    text_key: str = "text",
) -> Iterator[str]:
    """As `read_again`, in pieces of at most `piece_bytes` + 3 bytes of UTF-8, never empty.

    No more than a piece is held, but for jsonl, where a record is parsed whole. Raises OSError or
    ValueError, then also behind some pieces, when there is no such record now.
    """
    if not file.holds_plain_texts:
        text = read_again(file, text_key, place)
        characters = max(piece_bytes // 4, 1)
        yield from (text[at : at + characters] for at in range(0, len(text), characters))
        return
    offset, left, _ = place
    decoder = Utf8Decoder()
    with open(file.path, "rb") as stream:  # noqa: PTH123
        stream.seek(offset)
        while left:
            raw = stream.read(min(piece_bytes, left))
            if not raw:
                raise BadRecordError(0, f"the file ends {left:,} bytes before the record does")
            left -= len(raw)
            if text := decoder.decode(raw, final=not left):
                yield text
