"""csv: every row is a document, its text in the column `--text-key`.

The first row names the columns. Fields are separated by commas, in .tsv and .tab files by tabs. A
field with a separator or line break is in double quotes, with a quote inside it doubled.

Source: RFC 4180.
"""

import csv
import io
import sys
from collections.abc import Iterator
from typing import TextIO

from data_pipeline.errors import printable
from data_pipeline.readers.records import (
    MAX_RECORD_BYTES,
    BrokenStreamError,
    Record,
    Reject,
    did_you_mean,
)
from data_pipeline.readers.source import Source, too_long_error
from data_pipeline.system.sources import reject_reason

_TABS = (".tsv", ".tab")


def read_csv(source: Source) -> Iterator[Record | Reject]:
    try:
        # Bytes that are not UTF-8 become lone surrogates: they reject their row alone.
        stream = io.TextIOWrapper(source.stream, "utf-8-sig", errors="surrogateescape", newline="")
        with stream:
            yield from _read_rows(source, stream)
    except csv.Error as error:
        raise BrokenStreamError(source.lines + 1, 0, f"damaged CSV: {error}") from error
    except OSError as error:
        raise BrokenStreamError(source.lines + 1, 0, reject_reason(error)) from error


def _read_rows(source: Source, stream: TextIO) -> Iterator[Record | Reject]:
    # For the whole process. `_Lines` refuses rows that are too long.
    csv.field_size_limit(sys.maxsize)
    stem = source.name.lower().removesuffix(".gz").removesuffix(".zst")
    delimiter = "\t" if stem.endswith(_TABS) else ","
    lines = _Lines(source, stream)
    rows = csv.reader(lines, strict=True, delimiter=delimiter)
    columns = next(rows, None)
    if not columns:
        raise BrokenStreamError(0, 0, "it has no first row with the names of its columns")
    column = _column_of(columns, source.text_key, delimiter)
    lines.num_chars = 0
    for row in rows:
        lines.num_chars = 0
        if not row:
            continue  # a blank line
        source.lines += 1
        yield _record(source, row, column, len(columns))


class _Lines:
    """The lines of a stream. Raises BrokenStreamError for a row longer than a document can be.

    Without the limit, one quote that is not closed would read the rest of the file into memory.
    """

    def __init__(self, source: Source, stream: TextIO) -> None:
        self._source, self._stream = source, stream
        self.num_chars = 0
        """Characters of the current row. The caller sets it to 0 for the next row."""

    def __iter__(self) -> Iterator[str]:
        while line := self._stream.readline(MAX_RECORD_BYTES + 1):
            self.num_chars += len(line)
            if self.num_chars > MAX_RECORD_BYTES:
                reason = f"a row is {too_long_error().reason}; is a quote not closed?"
                raise BrokenStreamError(self._source.lines + 1, 0, reason)
            yield line


def _column_of(columns: list[str], text_key: str, delimiter: str) -> int:
    if columns.count(text_key) == 1:
        return columns.index(text_key)
    listed = ", ".join(printable(name)[:40] for name in columns[:20])
    if text_key in columns:
        raise BrokenStreamError(0, 0, f'two columns are named "{text_key}"; columns: {listed}')
    others = [name for name in (";", "\t", "|", ",") if name != delimiter and name in columns[0]]
    hint = f"; its columns seem to be separated by {others[0]!r}" if others else ""
    hint = hint or did_you_mean(text_key, tuple(columns[:100]))
    raise BrokenStreamError(
        0,
        0,
        f'no column "{text_key}"{hint}; columns: {listed} (see --text-key; --format text reads '
        "the raw file)",
    )


def _record(source: Source, row: list[str], column: int, num_columns: int) -> Record | Reject:
    if len(row) != num_columns:
        reason = f"the row has {len(row)} fields, the first row has {num_columns}"
        return source.reject(source.lines, 0, reason)
    text = row[column]
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        byte = len(text[: error.start].encode())
        return source.reject(source.lines, 0, f"invalid UTF-8 at byte {byte} of the text")
    return Record.of(text, offset=source.lines - 1, size=size, line=source.lines)
