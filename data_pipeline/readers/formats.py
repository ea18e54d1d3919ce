"""The table of formats, a file to read, and reading its records in its format.

A format is one function that reads a `Source` and one line in `FORMATS`
(docs/how_to/add_a_reader.md). `find.py` finds the files, `system/sources.py` opens them.
"""

import io
import math
import os
import posixpath
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from typing import BinaryIO, Literal, NamedTuple

from data_pipeline.errors import UnfinishedError
from data_pipeline.readers.columns import read_arrow, read_csv, read_parquet
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
    IdRules,
    Record,
    RecordBlock,
    Reject,
    Utf8Decoder,
    decode,
)
from data_pipeline.readers.source import CHUNK_BYTES, Source, Spill
from data_pipeline.readers.tar import read_tar
from data_pipeline.readers.wikitext import read_wikitext, read_wikitext_rows
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
Records = Iterator[Record | RecordBlock | Reject]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """How files of one kind are read."""

    read: Callable[[Source], Records]
    suffixes: tuple[str, ...] = ()
    """Suffixes that "auto" reads as this kind. In a folder, an explicit --format reads only these;
    () means all files that are not known to be binary."""
    stores: Literal["", "text", "json", "ids"] = ""
    """What the bytes of a record are, at its offset: its text, a line of JSON with it, or its token
    ids. "" if the text cannot be read from them."""
    by_range: bool = False
    """Whether `read` respects `start` and `stop` of the source and counts `lines`."""
    in_folders: bool = True
    """Whether "auto" reads these suffixes as this kind also in folders, not only by name or
    pattern. Folders of source code have .csv and .tar files that are not corpora."""


def _reader_of_ids(name: str) -> Callable[[Source], Records]:
    """A function of `ids.py`, imported with the first file: numpy would slow down `txl --help`."""

    def read(source: Source) -> Records:
        yield from getattr(import_module("data_pipeline.readers.ids"), name)(source)

    return read


FORMATS: dict[Kind, FileFormat] = {
    "text": FileFormat(read=read_text, stores="text"),
    "lines": FileFormat(read=read_lines, stores="text", by_range=True),
    "blank_lines": FileFormat(read=read_blank_lines, stores="text", by_range=True),
    "jsonl": FileFormat(
        read=read_jsonl,
        suffixes=(".jsonl", ".ndjson", ".jsonlines", ".ldjson", ".json"),
        stores="json",
        by_range=True,
    ),
    "parquet": FileFormat(read=read_parquet, suffixes=(".parquet", ".pq")),
    "wikitext": FileFormat(read=read_wikitext, stores="text", by_range=True),
    "wikitext_rows": FileFormat(read=read_wikitext_rows),
    "tar": FileFormat(read=read_tar, suffixes=(".tar",), in_folders=False),
    "arrow": FileFormat(read=read_arrow, suffixes=(".arrow",)),
    "csv": FileFormat(read=read_csv, suffixes=(".csv", ".tsv", ".tab"), in_folders=False),
    "binary": FileFormat(read=read_binary),
}
_ARRAY = FileFormat(read=_reader_of_ids("read_bin"), stores="ids", by_range=True)
ID_FORMATS: dict[Kind, FileFormat] = {
    "jsonl": replace(FORMATS["jsonl"], suffixes=(".jsonl", ".ndjson", ".jsonlines", ".ldjson")),
    "json": FileFormat(read=_reader_of_ids("read_id_json"), suffixes=(".json",)),
    "npy": replace(_ARRAY, read=_reader_of_ids("read_npy"), suffixes=(".npy",)),
    "parquet": FORMATS["parquet"],
    "arrow": FORMATS["arrow"],
    "tar": FORMATS["tar"],
    "megatron": replace(_ARRAY, read=_reader_of_ids("read_pair")),
    "bin": replace(_ARRAY, suffixes=(".bin",)),
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


# --- suffixes -------------------------------------------------------------------------------------


ARCHIVES = (".zip", ".tar")
"""The suffixes of archives that are read."""
ANY_ARCHIVE = {*ARCHIVES, ".7z", ".rar", ".lz4"}
_COMPRESSIONS: dict[str, Compression] = {
    **{".gz": "gz", ".gzip": "gz", ".zst": "zst", ".zstd": "zst"},
    **{".bz2": "bz2", ".bz": "bz2", ".xz": "xz"},
}
_PACKED_TARS = {".tgz": ".gz", ".tzst": ".zst", ".tbz": ".bz2", ".tbz2": ".bz2", ".txz": ".xz"}


class Suffix(NamedTuple):
    """The suffix of a file name in lower case, split at the compression."""

    name: str
    """The suffix without that of the compression."""
    packed: str
    """The suffix of the compression, or an empty string."""

    def __str__(self) -> str:
        return self.name + self.packed or "without suffix"

    @property
    def compression(self) -> Compression:
        return _COMPRESSIONS.get(self.packed, "")


def suffix_of(name: str) -> Suffix:
    stem, last = posixpath.splitext(name.lower())
    if last in _PACKED_TARS:
        return Suffix(".tar", _PACKED_TARS[last])
    if last in _COMPRESSIONS:
        return Suffix(posixpath.splitext(stem)[1], last)
    return Suffix(last, "")


# --- a file ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file to read."""

    path: str
    """A local path or a URL."""
    name: str
    """The path relative to the input folder, always valid UTF-8."""
    compression: Compression = ""
    size: int = 0
    """Stored bytes when the file was listed; 0 if unknown."""
    mark: str = ""
    """A version mark: modification time or entity tag. "" if the file system has none."""
    kind: Kind = ""
    """An empty string until `find.py` has decided it."""
    ids: IdRules | None = None
    """Set if the documents are token ids instead of text."""
    is_spilled: bool = False
    """Whether its texts are written to a spill file when they are located, because they cannot be
    read again from their place in the file. `find.py` decides it with the kind."""
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

    def open(self) -> AbstractContextManager[BinaryIO]:
        """The decompressed stream, as `open_source`."""
        return open_source(self.path, self.compression)

    def first_bytes(self, size: int) -> bytes:
        """The first `size` decompressed bytes; fewer if there are fewer or reading fails."""
        try:
            if self.compression or scheme_of(self.path):
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

    def source(self, stream: BinaryIO, text_key: str) -> Source:
        """What a reader of all records gets."""
        return Source(
            stream=stream,
            name=self.name,
            path=self.path,
            next_paths=self.next_paths,
            stored_bytes=self.size,
            text_key=text_key,
            ids=self.ids,
            keeps_nul=self.keeps_nul,
            rereads=not self.is_spilled,
        )


def must_spill(file: InputFile) -> bool:
    """Whether the texts of a file cannot be read again from their place in it."""
    stores = file.format.stores
    lacks_dtype = stores == "ids" and not (file.ids and file.ids.dtype)
    return bool(file.compression or scheme_of(file.path)) or not stores or lacks_dtype


# --- reading its records --------------------------------------------------------------------------


def scan_ranges(file: InputFile, unit_bytes: int) -> list[tuple[int, int]]:
    """The byte ranges [start, stop) of about `unit_bytes` that can be read independently, in order.

    A record belongs to the range that contains its first byte. A file that cannot be cut is one
    range. There is at least one range.
    """
    if unit_bytes < 1:
        raise ValueError(f"unit_bytes={unit_bytes} must be at least 1")
    if file.is_spilled or not file.format.by_range or not file.size:
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
    """If given, long texts of a file that is spilled are written there. Their records have no
    text, and the offset in it."""

    def __iter__(self) -> Records:
        file, source = self.file, None
        try:
            if not scheme_of(file.path):
                # A file that was cut after it was listed would lose records silently.
                paths = (file.path, *file.next_paths)
                size = sum(os.stat(path).st_size for path in paths)  # noqa: PTH116 - it is faster
                if size < file.size:
                    reason = f"it had {file.size:,} bytes when it was found and has {size:,} now"
                    raise SourceError(reason)
            with file.open() as stream:
                source = file.source(stream, self.text_key)
                source.start, source.spill = self.start, self.spill
                source.stop = math.inf if self.stop >= file.size else self.stop
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


def text_of_stored(file: InputFile, stored: bytes, text_key: str) -> str:
    """The text of a record, given its bytes in a file that is not spilled. Raises ValueError."""
    if file.format.stores == "text":
        return decode(stored)
    if file.format.stores == "json":
        return text_of_line(stored, text_key, file.ids)
    from data_pipeline.readers.ids import read_id_chunks

    assert file.ids
    return "".join(read_id_chunks(io.BytesIO(stored), len(stored), file.ids))


def read_text_chunks(
    file: InputFile,
    place: tuple[int, int, int],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    text_key: str = "text",
) -> Iterator[str]:
    """The text of the record at `place` (offset, size, line) in a file that is not spilled.

    Yields non-empty chunks of at most `chunk_bytes` + 3 bytes of UTF-8. Holds one chunk in RAM;
    for jsonl the whole record. Raises OSError or ValueError, possibly after some chunks, if the
    file has changed and has no such record.
    """
    with open(file.path, "rb") as stream:  # noqa: PTH123 - faster, and this runs per document
        stream.seek(place[0])
        if file.format.stores == "ids" and file.ids:
            from data_pipeline.readers.ids import read_id_chunks

            yield from read_id_chunks(stream, place[1], file.ids)
        elif file.format.stores == "text":
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
