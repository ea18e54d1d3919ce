"""The table of formats, and reading records of a file in its format.

A format is one function that reads a `Source` and one line in `FORMATS`
(docs/how_to/add_a_reader.md). `find.py` finds the files, `system/sources.py` opens them.
"""

import io
import math
import os
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from typing import BinaryIO

from data_pipeline.errors import UnfinishedError
from data_pipeline.readers.columns import read_arrow, read_csv, read_parquet
from data_pipeline.readers.ids import IdRules, read_id_json
from data_pipeline.readers.lines import (
    read_binary,
    read_blank_lines,
    read_jsonl,
    read_lines,
    read_text,
    text_of_line,
)
from data_pipeline.readers.records import (
    BadRecordError,
    BrokenStreamError,
    Record,
    RecordBlock,
    Reject,
    Utf8Decoder,
    decode,
)
from data_pipeline.readers.source import CHUNK_BYTES, Source, Spill
from data_pipeline.readers.tar import read_tar
from data_pipeline.readers.wikitext import (
    read_wikitext,
    read_wikitext_rows,
)
from data_pipeline.system.files import open_descriptor
from data_pipeline.system.sources import (
    Compression,
    SourceError,
    is_transient,
    open_source,
    reject_reason,
    scheme_of,
    shown,
)

Kind = str
"""A key of FORMATS, or of ID_FORMATS for files of token ids."""
Format = str
"""A key of FORMATS; "auto": decided for every file by its name (`kinds.py`); or "ids": token ids,
the kind decided by the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """How files of one kind are read."""

    read: Callable[[Source], Iterator[Record | RecordBlock | Reject]]
    suffixes: tuple[str, ...] = ()
    """Suffixes that "auto" reads as this kind. In a folder, an explicit --format reads only these;
    () means all files that are not known to be binary."""
    read_again: Callable[[bytes, str, IdRules | None], str] | None = None
    """(bytes of the record, text key, rules of ids) -> text. None if that is not possible."""
    by_range: bool = False
    """Whether `read` respects `start` and `stop` of the source and counts `lines`."""
    in_folders: bool = True
    """Whether "auto" reads these suffixes as this kind also in folders, not only by name or
    pattern. Folders of source code have .csv and .tar files that are not corpora."""


def _decode_raw(raw: bytes, _text_key: str, _ids: IdRules | None) -> str:
    return decode(raw)


def _decode_ids(raw: bytes, _text_key: str, ids: IdRules | None) -> str:
    from data_pipeline.readers.id_arrays import read_id_chunks

    assert ids
    return "".join(read_id_chunks(io.BytesIO(raw), len(raw), ids))


def _id_format(module: str, function: str, *suffixes: str) -> FileFormat:
    """Files whose documents are byte ranges of token ids."""

    def read(source: Source) -> Iterator[Record | Reject]:
        # Imported with the first file: numpy would slow down `txl --help`.
        yield from getattr(import_module(f"data_pipeline.readers.{module}"), function)(source)

    return FileFormat(read=read, suffixes=suffixes, read_again=_decode_ids, by_range=True)


FORMATS: dict[Kind, FileFormat] = {
    "text": FileFormat(read=read_text, read_again=_decode_raw),
    "lines": FileFormat(read=read_lines, read_again=_decode_raw, by_range=True),
    "blank_lines": FileFormat(read=read_blank_lines, read_again=_decode_raw, by_range=True),
    "jsonl": FileFormat(
        read=read_jsonl,
        suffixes=(".jsonl", ".ndjson", ".jsonlines", ".ldjson", ".json"),
        read_again=text_of_line,
        by_range=True,
    ),
    "parquet": FileFormat(read=read_parquet, suffixes=(".parquet", ".pq")),
    "wikitext": FileFormat(read=read_wikitext, read_again=_decode_raw, by_range=True),
    "wikitext_rows": FileFormat(read=read_wikitext_rows),
    "tar": FileFormat(read=read_tar, suffixes=(".tar",), in_folders=False),
    "arrow": FileFormat(read=read_arrow, suffixes=(".arrow",)),
    "csv": FileFormat(read=read_csv, suffixes=(".csv", ".tsv", ".tab"), in_folders=False),
    "binary": FileFormat(read=read_binary),
}
ID_FORMATS: dict[Kind, FileFormat] = {
    "jsonl": replace(FORMATS["jsonl"], suffixes=(".jsonl", ".ndjson", ".jsonlines", ".ldjson")),
    "json": FileFormat(read=read_id_json, suffixes=(".json",)),
    "npy": _id_format("id_arrays", "read_npy", ".npy"),
    "parquet": FORMATS["parquet"],
    "arrow": FORMATS["arrow"],
    "tar": FORMATS["tar"],
    "megatron": _id_format("indexed_ids", "read_pair"),
    "bin": _id_format("id_arrays", "read_bin", ".bin"),
}
"""The kinds of files that `--format ids` reads, with token ids instead of text."""


def format_names() -> tuple[str, ...]:
    """The values of `--format` other than auto."""
    return (*(kind for kind in FORMATS if kind not in ("binary", "wikitext_rows")), "ids")


def suffixes_of(format: Format) -> tuple[str, ...]:
    """The suffixes of the files that an explicit format reads; () for all."""
    if format == "ids":
        return tuple(suffix for each in ID_FORMATS.values() for suffix in each.suffixes)
    return FORMATS[format].suffixes


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file to read."""

    path: str
    """A local path or a URL."""
    name: str
    """The path relative to the input folder, always valid UTF-8."""
    kind: Kind
    """An empty string until `find.py` has decided it."""
    compression: Compression
    size: int
    """Stored bytes when the file was listed; 0 if unknown."""
    mark: str = ""
    """A version mark: modification time or entity tag. "" if the file system has none."""
    ids: IdRules | None = None
    """Set if the documents are token ids instead of text."""
    split: str = ""
    """The split that the input gives to the file (`names.py`); "" if it gives none."""
    keeps_nul: bool = False
    """Whether NUL bytes are text (`--format text`), not the sign of a binary file."""
    next_paths: tuple[str, ...] = ()
    """wikitext_rows: files in which the content of this one continues; `size` and `mark` include
    theirs."""
    archive: str = ""
    """The address of the archive from which `path` was unpacked; `mark` is then that of it."""
    member: str = ""
    """The path in this archive."""

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """The decompressed stream of the file, as `open_source`."""
        with open_source(self.path, self.compression) as stream:
            yield stream

    def first_bytes(self, size: int) -> bytes:
        """The first `size` decompressed bytes; fewer if there are fewer or reading fails."""
        try:
            if not self.is_plain:
                with self.open() as stream:
                    return stream.read(size)
            # A fifth of the time of `open`, which matters for many files.
            with open_descriptor(self.path) as descriptor:
                return os.read(descriptor, size)
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

    @property
    def format(self) -> FileFormat:
        return (ID_FORMATS if self.ids else FORMATS)[self.kind]

    @property
    def place(self) -> str:
        """The address for the user: `path`, or that of the member of an archive."""
        return f"{self.archive}/{self.member}" if self.archive else self.path

    @property
    def is_plain(self) -> bool:
        """Whether it is a local file that is not compressed."""
        return not self.compression and not scheme_of(self.path)

    @property
    def rereadable(self) -> bool:
        """Whether the text of a record can be read again from its offset and size."""
        lacks_dtype = self.ids is not None and self.holds_arrays and not self.ids.dtype
        can_read_again = self.format.read_again is not None and not lacks_dtype
        return self.is_plain and can_read_again

    @property
    def holds_plain_texts(self) -> bool:
        """Whether the bytes at a record's offset are its text in UTF-8."""
        return self.rereadable and self.format.read_again is _decode_raw

    @property
    def holds_arrays(self) -> bool:
        """Whether the bytes at a record's offset are its token ids."""
        return self.format.read_again is _decode_ids

    @property
    def has_keys(self) -> bool:
        """Whether its documents have names instead of line numbers (`Record.key`)."""
        return self.kind == "tar"


def scan_ranges(file: InputFile, unit_bytes: int) -> list[tuple[int, int]]:
    """The byte ranges [start, stop) of about `unit_bytes` that can be read independently, in order.

    A record belongs to the range that contains its first byte. A file that cannot be cut is one
    range. There is at least one range.
    """
    if unit_bytes < 1:
        raise ValueError(f"unit_bytes={unit_bytes} must be at least 1")
    if not file.rereadable or not file.format.by_range or not file.size:
        return [(0, file.size)]
    starts = range(0, file.size, unit_bytes)
    return [(start, min(start + unit_bytes, file.size)) for start in starts]


@dataclass(slots=True)
class RecordReader:
    """Iterates over the records whose first byte is in [start, stop), one of `scan_ranges`.

    They are in order; readers of short documents yield many as a block. A bad record is a Reject.
    Raises UnfinishedError if a disk or server fails temporarily.
    """

    file: InputFile
    text_key: str
    start: int
    stop: int
    lines: int = 0
    """The lines that start in the range; set at the end of the iteration. To get line numbers of
    the file, add the lines of all earlier ranges to every `line` that is not 0."""
    spill: Spill | None = None
    """If given, long texts of a file that is not rereadable are written there. Their records have
    no text, and the offset in it."""

    def __iter__(self) -> Iterator[Record | RecordBlock | Reject]:
        file, source = self.file, None
        try:
            _reject_shrunk_file(file)
            with file.open() as stream:
                stop = math.inf if self.stop >= file.size else self.stop
                source = Source(file, stream, self.start, stop, self.text_key, spill=self.spill)
                yield from file.format.read(source)
                self.lines = source.lines
        except BrokenStreamError as error:
            yield self._reject_rest(error, error)
        except OSError as error:
            line = source.lines if source else 0
            yield self._reject_rest(error, BrokenStreamError(line, 0, reject_reason(error)))

    def _reject_rest(self, cause: Exception, broken: BrokenStreamError) -> Reject:
        if is_transient(cause):
            raise UnfinishedError(
                f"{shown(self.file.place)}: {broken.reason}. Finished work is kept; run the same "
                "command again when the disk or network works."
            ) from cause
        return Reject(self.file.name, broken.line, broken.byte, broken.reason, loses_rest=True)


def _reject_shrunk_file(file: InputFile) -> None:
    # Without this check, a file cut after it was listed would lose records silently.
    if not scheme_of(file.path):
        paths = (file.path, *file.next_paths)
        size = sum(os.stat(path).st_size for path in paths)  # noqa: PTH116 - faster for many files
        if size < file.size:
            raise SourceError(f"it had {file.size:,} bytes when it was found and has {size:,} now")


def text_of_stored(file: InputFile, stored: bytes, text_key: str) -> str:
    """The text of a record of a rereadable file, given its stored bytes. Raises ValueError."""
    parse = file.format.read_again
    if not file.rereadable or parse is None:
        raise ValueError(f"{file.name}: its records cannot be read again by their offset")
    return parse(stored, text_key, file.ids)


def read_text_chunks(
    file: InputFile,
    place: tuple[int, int, int],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    text_key: str = "text",
) -> Iterator[str]:
    """The text of the record at `place` (offset, size, line) in a rereadable file.

    Yields non-empty chunks of at most `chunk_bytes` + 3 bytes of UTF-8. Holds one chunk in RAM;
    for jsonl the whole record. Raises OSError or ValueError, possibly after some chunks, if the
    file has changed and has no such record.
    """
    with open(file.path, "rb") as stream:  # noqa: PTH123 - faster, and this runs per document
        stream.seek(place[0])
        if file.holds_arrays and file.ids:
            from data_pipeline.readers.id_arrays import read_id_chunks

            yield from read_id_chunks(stream, place[1], file.ids)
        elif file.holds_plain_texts:
            yield from _read_plain_chunks(stream, place[1], chunk_bytes)
        else:
            text = text_of_stored(file, stream.read(place[1]), text_key)
            characters = max(chunk_bytes // 4, 1)  # a character has at most 4 bytes
            yield from (text[at : at + characters] for at in range(0, len(text), characters))


def _read_plain_chunks(stream: BinaryIO, num_bytes: int, chunk_bytes: int) -> Iterator[str]:
    decoder = Utf8Decoder()
    while num_bytes:
        raw = stream.read(min(chunk_bytes, num_bytes))
        if not raw:
            raise BadRecordError(0, f"the file ends {num_bytes:,} bytes before the record does")
        num_bytes -= len(raw)
        if text := decoder.decode(raw, final=not num_bytes):
            yield text
