"""The table of formats, and reading the records of a file in its format.

A format is one function that reads a `Source` and one line in `FORMATS`
(docs/how_to/add_a_reader.md). `find.py` finds the files, `system/sources.py` opens them.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import BinaryIO, Literal

from data_pipeline.errors import UnfinishedError
from data_pipeline.readers.columns import read_arrow, read_csv, read_parquet
from data_pipeline.readers.input_file import InputFile
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
    Reject,
    Utf8Decoder,
    decode,
)
from data_pipeline.readers.source import CHUNK_BYTES, Source
from data_pipeline.readers.tar import read_tar
from data_pipeline.readers.wikitext import read_wikitext, read_wikitext_rows
from data_pipeline.system.sources import (
    SourceError,
    is_transient,
    reject_reason,
    scheme_of,
    shown,
)

Kind = str
"""A key of FORMATS, or of ID_FORMATS for files of token ids."""
Format = str
"""A key of FORMATS; "auto": decided for every file by its name (`kinds.py`); or "ids": token ids,
the kind decided by the name."""
Records = Iterator[Record | Reject]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """How files of one kind are read."""

    read: Callable[[Source], Records]
    suffixes: tuple[str, ...] = ()
    """Suffixes that "auto" reads as this kind. In a folder, an explicit --format reads only these;
    () means all files that are not known to be binary."""
    stores: Literal["", "text", "json"] = ""
    """What the bytes of a record are, at its offset: its text, or a line of JSON with it. "" if the
    text cannot be read from them."""
    by_range: bool = False
    """Whether `read` respects `start` and `stop` of the source and counts `lines`."""
    in_folders: bool = True
    """Whether "auto" reads these suffixes as this kind also in folders, not only by name or
    pattern. Folders of source code have .csv and .tar files that are not corpora."""


def _of_ids(module: str, name: str) -> Callable[[Source], Records]:
    """A reader that is imported with the first file: numpy would slow down `txl --help`."""

    def read(source: Source) -> Records:
        yield from getattr(import_module(f"data_pipeline.readers.{module}"), name)(source)

    return read


FORMATS: dict[Kind, FileFormat] = {
    "text": FileFormat(read=read_text, stores="text"),
    "lines": FileFormat(read=read_lines, stores="text", by_range=True),
    "blank_lines": FileFormat(read=read_blank_lines, stores="text"),
    "jsonl": FileFormat(
        read=read_jsonl,
        suffixes=(".jsonl", ".ndjson", ".jsonlines", ".ldjson", ".json"),
        stores="json",
        by_range=True,
    ),
    "parquet": FileFormat(read=read_parquet, suffixes=(".parquet", ".pq")),
    "wikitext": FileFormat(read=read_wikitext, stores="text"),
    "wikitext_rows": FileFormat(read=read_wikitext_rows),
    "tar": FileFormat(read=read_tar, suffixes=(".tar",), in_folders=False),
    "arrow": FileFormat(read=read_arrow, suffixes=(".arrow",)),
    "csv": FileFormat(read=read_csv, suffixes=(".csv", ".tsv", ".tab"), in_folders=False),
    "binary": FileFormat(read=read_binary),
}
ID_FORMATS: dict[Kind, FileFormat] = {
    "jsonl": replace(FORMATS["jsonl"], suffixes=(".jsonl", ".ndjson", ".jsonlines", ".ldjson")),
    "json": FileFormat(read=_of_ids("ids", "read_id_json"), suffixes=(".json",)),
    "npy": FileFormat(read=_of_ids("ids", "read_npy"), suffixes=(".npy",), by_range=True),
    "parquet": FORMATS["parquet"],
    "arrow": FORMATS["arrow"],
    "tar": FORMATS["tar"],
    "megatron": FileFormat(read=_of_ids("megatron", "read_pair"), by_range=True),
    "bin": FileFormat(read=_of_ids("ids", "read_bin"), suffixes=(".bin",), by_range=True),
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


def format_of(file: InputFile) -> FileFormat:
    """The format of a file whose kind is decided."""
    return (ID_FORMATS if file.ids else FORMATS)[file.kind]


# --- reading the records of a file ----------------------------------------------------------------


def must_spill(file: InputFile) -> bool:
    """Whether the texts of a file cannot be read again from their place in it."""
    return bool(file.compression or scheme_of(file.path) or not format_of(file).stores)


def scan_ranges(file: InputFile, unit_bytes: int) -> list[tuple[int, int]]:
    """The byte ranges [start, stop) of about `unit_bytes` that can be read independently, in order.

    A record belongs to the range that contains its first byte. A file that cannot be cut is one
    range. There is at least one range.
    """
    is_plain = not (file.compression or scheme_of(file.path))
    if not (is_plain and format_of(file).by_range and file.size):
        return [(0, file.size)]
    starts = range(0, file.size, unit_bytes)
    return [(start, min(start + unit_bytes, file.size)) for start in starts]


def read_records(source: Source) -> Records:
    """The records whose first byte is in the range of `source`, one of `scan_ranges`, in order.

    A bad record is a Reject. Raises UnfinishedError if a disk or server fails temporarily.
    """
    file = source.file
    if source.stop >= file.size:
        source.stop = math.inf
    try:
        if not scheme_of(file.path):
            # A file that was cut after it was listed would lose records silently.
            paths = (file.path, *file.next_paths)
            size = sum(os.stat(path).st_size for path in paths)  # noqa: PTH116 - it is faster
            if size < file.size:
                reason = f"it had {file.size:,} bytes when it was found and has {size:,} now"
                raise SourceError(reason)
        with file.open() as source.stream:
            yield from format_of(file).read(source)
    except (BrokenStreamError, OSError) as error:
        if isinstance(error, BrokenStreamError):
            broken = error
        else:
            broken = BrokenStreamError(source.lines, 0, reject_reason(error))
        if is_transient(error):
            raise UnfinishedError(
                f"{shown(file.place)}: {broken.reason}. Finished work is kept; run the same "
                "command again when the disk or network works."
            ) from error
        source.lines = 0
        yield Reject(file.name, broken.line, broken.byte, broken.reason, loses_rest=True)


def text_of_stored(file: InputFile, stored: bytes, text_key: str) -> str:
    """The text of a record, given its bytes in a file that is not spilled. Raises ValueError."""
    if format_of(file).stores == "text":
        return decode(stored)
    return text_of_line(stored, text_key, file.ids)


def read_text_chunks(
    file: InputFile, place: tuple[int, int, int], *, text_key: str = "text"
) -> Iterator[str]:
    """The text of the record at `place` (offset, size, line) in a file that is not spilled.

    Yields chunks of about CHUNK_BYTES, for jsonl the whole text. Raises OSError or ValueError,
    possibly after some chunks, if the file has changed and has no such record.
    """
    with open(file.path, "rb") as stream:  # noqa: PTH123 - faster, and this runs per document
        stream.seek(place[0])
        if format_of(file).stores == "text":
            yield from _read_plain_chunks(stream, place[1])
        else:
            yield text_of_stored(file, stream.read(place[1]), text_key)


def _read_plain_chunks(stream: BinaryIO, num_bytes: int) -> Iterator[str]:
    decoder = Utf8Decoder()
    while num_bytes:
        raw = stream.read(min(CHUNK_BYTES, num_bytes))
        if not raw:
            raise BadRecordError(0, f"the file ends {num_bytes:,} bytes before the record does")
        num_bytes -= len(raw)
        yield decoder.decode(raw, final=not num_bytes)
