"""Rows of tables as documents, with the text in the column `--text-key`: parquet, arrow and csv.

parquet: the column contains strings or UTF-8 binary values, plain or dictionary-encoded, or with
`--format ids` lists of integers. Rows are read in batches of about 8 MiB, so a large row group is
not decoded as a whole. Page checksums are verified if the file has them.

arrow: an Arrow IPC stream, as `datasets.save_to_disk` writes it, with the same types. The file
format (Feather version 2) is read as well: it is a stream between a magic number and a footer. A
stream must have its end mark, because one that is cut between two messages is otherwise valid.

csv: the first row names the columns. Fields are separated by commas, in .tsv and .tab files by
tabs. A field with a separator or line break is in double quotes, with a quote inside it doubled.
Many TSV files have no quotes, so that a text that begins with one would be joined with the rows up
to a text that ends with one. Such rows are rejected (`_num_joined_rows`), unless the names of the
columns are in quotes, too.

Sources: Apache Arrow, "Arrow Columnar Format", section "IPC Streaming Format"; RFC 4180.
"""

import csv
import io
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO, TextIO

from data_pipeline.errors import printable
from data_pipeline.readers.ids import text_of_array
from data_pipeline.readers.source import (
    MAX_RECORD_BYTES,
    BadRecordError,
    BrokenStreamError,
    Record,
    Reject,
    Source,
    read_exactly,
    too_long,
)
from data_pipeline.system.sources import SourceError

_BATCH_BYTES = 8 * 2**20
_MAX_BATCH_ROWS = 4096
_MAGIC = b"ARROW1"
_JOINED_REASON = (
    "a field that begins with a double quote ends rows later, at the next one. In a file without "
    "quoted fields, write such texts with their quotes doubled and in quotes, or as JSON lines"
)
_END_MARK = b"\xff\xff\xff\xff\0\0\0\0"


def read_table(source: Source) -> Iterator[Record | Reject]:
    for value in values_of(source):
        yield source.record(partial(text_of_scalar, source), value, line=source.lines)


def values_of(source: Source) -> Iterator[Any]:
    """The values of the column as Arrow scalars, counted in `source.lines`.

    Raises BrokenStreamError for a damaged file.
    """
    import pyarrow

    is_arrow = "arrow" in (source.file.kind, source.file.suffix.name.removeprefix("."))
    try:
        for value in (_arrow_values if is_arrow else _parquet_values)(source):
            source.lines += 1
            yield value
    except (BrokenStreamError, SourceError):
        raise
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError, TypeError) as error:
        reason = printable(str(error).split("\n")[0])[:200]
        line = source.lines + bool(source.lines)
        kind = "Arrow" if is_arrow else "Parquet"
        raise BrokenStreamError(f"damaged {kind} file: {reason}", line=line) from error


def text_of_scalar(source: Source, value: Any) -> str:
    """The text of a row, from its Arrow scalar. Raises BadRecordError."""
    if source.file.ids and value.is_valid:
        if value.values.null_count:
            raise BadRecordError(f'"{source.text_key}" has null among its ids')
        return text_of_array(value.values.to_numpy(zero_copy_only=False), source.file.ids)
    try:
        text = value.as_py()
        if text is None:
            raise BadRecordError(f'"{source.text_key}" is null')
        return text.decode() if isinstance(text, bytes) else str(text)
    except UnicodeDecodeError as error:
        raise BadRecordError(f"invalid UTF-8 at byte {error.start} of the text") from None


def _parquet_values(source: Source) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    if not source.stream.seekable():
        raise BrokenStreamError(
            "Parquet needs random access, but this file is compressed as a whole or its server "
            "has no byte ranges. Parquet compresses inside: use the plain file"
        )
    file = ParquetFile(source.stream, page_checksum_verification=True)
    _require_column(file.schema_arrow, source)
    groups = range(file.metadata.num_row_groups)
    total = sum(file.metadata.row_group(group).num_rows for group in groups)
    if total != file.metadata.num_rows:
        raise ValueError(f"its row groups have {total} rows, not {file.metadata.num_rows}")
    for group in groups:
        metadata = file.metadata.row_group(group)
        row_bytes = metadata.total_byte_size // max(metadata.num_rows, 1) + 1
        rows = max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // row_bytes))
        missing = metadata.num_rows
        batches = file.iter_batches(
            rows, row_groups=[group], columns=[source.text_key], use_threads=False
        )
        for batch in batches:
            yield from batch.column(0)
            missing -= len(batch)
        if missing:  # a damaged page header can drop rows without an error
            raise ValueError(f"row group {group} lacks {missing} of its rows")


def _arrow_values(source: Source) -> Iterator[Any]:
    import pyarrow

    is_file = source.stream.peek(len(_MAGIC))[: len(_MAGIC)] == _MAGIC  # type: ignore[attr-defined]
    if is_file:
        source.stream.read(len(_MAGIC) + 2)
    tail = _Tail(source.stream)
    reader = pyarrow.ipc.open_stream(pyarrow.PythonFile(tail, mode="r"))
    _require_column(reader.schema, source)
    as_bytes = {
        pyarrow.string(): pyarrow.binary(),
        pyarrow.large_string(): pyarrow.large_binary(),
        pyarrow.string_view(): pyarrow.binary_view(),
    }
    for batch in reader:
        column = batch.column(reader.schema.names.index(source.text_key))
        if column.type in as_bytes:  # invalid UTF-8 in bytes rejects one row, not the batch
            column = column.view(as_bytes[column.type])
        column.validate(full=True)  # all offsets, which pyarrow otherwise trusts
        if len(column) != batch.num_rows:
            raise ValueError(f"a batch of {batch.num_rows} rows has {len(column)} texts")
        yield from column
    if tail.last != _END_MARK:
        raise ValueError("truncated: it has no end mark")
    rest = source.stream.read(len(_MAGIC) if not is_file else -1)
    if rest and not is_file:
        raise ValueError("there is data after its end mark, such as another file")
    if is_file and not rest.endswith(_MAGIC):
        raise ValueError("truncated: it has no footer")


class _Tail:
    """A stream for pyarrow that keeps the last bytes that were read."""

    closed = False

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.last = stream, b""

    def read(self, size: int = -1) -> bytes:
        raw = read_exactly(self._stream, size)
        self.last = (self.last + raw)[-len(_END_MARK) :] if raw else b""
        return raw


def _require_column(schema: Any, source: Source) -> None:
    """Raise BrokenStreamError if the Arrow schema has no column of texts, or of token ids."""
    _index_of_column(schema.names, source.text_key)
    kind = schema.field(source.text_key).type
    if not (_holds_ids(kind) if source.file.ids else _holds_text(kind)):
        content = "lists of integers" if source.file.ids else "strings"
        hint = " (for token ids: --format ids)" * (not source.file.ids and _holds_ids(kind))
        raise BrokenStreamError(
            f'column "{source.text_key}" is not of {content} but of {kind}{hint}'
        )


def _index_of_column(columns: list[str], text_key: str) -> int:
    """The position of the column. Raises BrokenStreamError unless exactly one has this name."""
    if (count := columns.count(text_key)) != 1:
        problem = f'"{text_key}" names {count} columns' if count else f'no column "{text_key}"'
        listed = ", ".join(printable(name)[:40] for name in columns[:20]) or "none"
        raise BrokenStreamError(f"{problem}; columns: {listed} (see --text-key and --format)")
    return columns.index(text_key)


def _holds_ids(kind: Any) -> bool:
    """Whether a column of this Arrow type contains lists of integers."""
    from pyarrow import types

    is_list = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return any(test(kind) for test in is_list) and types.is_integer(kind.value_type)


def _holds_text(kind: Any) -> bool:
    """Whether a column of this Arrow type contains strings or bytes, also dictionary-encoded."""
    from pyarrow import types

    plain = kind.value_type if types.is_dictionary(kind) else kind
    return any(
        test(plain)
        for test in (
            *(types.is_string, types.is_large_string, types.is_string_view),
            *(types.is_binary, types.is_large_binary, types.is_binary_view),
        )
    )


# --- csv ------------------------------------------------------------------------------------------


def read_csv(source: Source) -> Iterator[Record | Reject]:
    csv.field_size_limit(sys.maxsize)  # for the whole process; `_bounded_lines` has a limit
    is_tsv = source.file.suffix.name in (".tsv", ".tab")
    first = source.stream.peek(4).removeprefix(BOM_UTF8)  # type: ignore[attr-defined]
    has_quotes = not is_tsv or first.startswith(b'"')
    # Bytes that are not UTF-8 become lone surrogates: they reject their row alone.
    stream = io.TextIOWrapper(source.stream, "utf-8-sig", errors="surrogateescape", newline="")
    try:
        with stream:
            rows = csv.reader(_bounded_lines(source, stream), strict=True, delimiter=",\t"[is_tsv])
            columns = next(rows, None)
            if not columns:
                raise BrokenStreamError("it has no first row with the names of its columns")
            column = _index_of_column(columns, source.text_key)
            text_of = partial(_text_of_row, column=column, num_columns=len(columns))
            for row in rows:
                num_joined = 0 if has_quotes else _num_joined_rows(row)
                for _ in range(num_joined):
                    source.lines += 1
                    yield source.reject(source.lines, 0, _JOINED_REASON)
                if row and not num_joined:  # a blank line has no fields
                    source.lines += 1
                    yield source.record(text_of, row, line=source.lines)
    except csv.Error as error:
        reason = f"damaged CSV: {error}; is a quote not closed?"
        raise BrokenStreamError(reason, line=source.lines + 1) from error


def _num_joined_rows(row: list[str]) -> int:
    """How many rows of the file `row` consists of if quotes have joined them; 0 if it is one row.

    Each line of joined rows has as many tabs as a row. In a quoted text with tabs and lines, such
    as code, at least one line has more or fewer.
    """
    lines = "\t".join(row).split("\n")
    tabs = len(row) - 1
    is_joined = tabs and len(lines) > 1 and all(line.count("\t") == tabs for line in lines)
    return len(lines) if is_joined else 0


def _bounded_lines(source: Source, stream: TextIO) -> Iterator[str]:
    """The lines of a stream. Raises csv.Error for a row longer than a document can be.

    Without the limit, one quote that is not closed would read the rest of the file into RAM.
    """
    row = num_chars = 0
    while line := stream.readline(MAX_RECORD_BYTES + 1):
        if row != source.lines:
            row, num_chars = source.lines, 0
        num_chars += len(line)
        if num_chars > MAX_RECORD_BYTES:
            raise csv.Error(f"a row is {too_long().reason}")
        yield line


def _text_of_row(row: list[str], *, column: int, num_columns: int) -> str:
    if len(row) != num_columns:
        raise BadRecordError(f"the row has {len(row)} fields, the first row has {num_columns}")
    try:
        row[column].encode()
    except UnicodeEncodeError as error:
        byte = len(row[column][: error.start].encode())
        raise BadRecordError(f"invalid UTF-8 at byte {byte} of the text") from None
    return row[column]
