"""parquet: every row of a Parquet file is a document, with its text in the column `--text-key`.

The column contains strings or UTF-8 binary values, plain or dictionary-encoded, or with
`--format ids` lists of integers. Rows are read in batches of about 8 MiB, so a large row group is
not decoded as a whole. Page checksums are verified if the file has them.
"""

from collections.abc import Iterator
from typing import Any

from data_pipeline.errors import printable
from data_pipeline.readers.records import (
    MAX_RECORD_BYTES,
    BadRecordError,
    BrokenStreamError,
    Record,
    Reject,
    did_you_mean,
    ids_hint,
)
from data_pipeline.readers.source import Source, too_long_error
from data_pipeline.system.sources import SourceError

_BATCH_BYTES = 8 * 2**20
_MAX_BATCH_ROWS = 4096


def read_parquet(source: Source) -> Iterator[Record | Reject]:
    import pyarrow

    row = 0
    try:
        for value in _values(source):
            row += 1
            yield record_of_value(source, row, value)
    except SourceError as error:
        raise BrokenStreamError(row + 1, 0, error.reason) from error
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, BrokenStreamError):
            raise
        reason = printable(str(error).split("\n")[0])[:200]
        raise BrokenStreamError(row + bool(row), 0, f"damaged Parquet file: {reason}") from error


def _values(source: Source) -> Iterator[Any]:
    """The values of the text column, as Arrow scalars."""
    from pyarrow.parquet import ParquetFile

    if not source.stream.seekable():
        raise BrokenStreamError(
            0,
            0,
            "Parquet needs random access, but this file is compressed as a whole or its server "
            "has no byte ranges. Parquet compresses inside: use the plain file",
        )
    file = ParquetFile(source.stream, page_checksum_verification=True)
    require_column(file.schema_arrow, source)
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


def require_column(schema: Any, source: Source) -> None:
    """Raise BrokenStreamError if the Arrow schema has no column of texts, or of token ids."""
    holds, content = (_holds_ids, "lists of integers") if source.ids else (_holds_text, "strings")
    text_key = source.text_key
    names = [printable(name)[:40] for name in schema.names]
    count = schema.names.count(text_key)
    if count != 1:
        problem = f'no column "{text_key}"' if not count else f'"{text_key}" names {count} columns'
        hint = did_you_mean(text_key, tuple(each.name for each in schema if holds(each.type)))
        hint = hint or ids_hint(*(each.name for each in schema if _holds_ids(each.type)))
        listed = ", ".join(names[:20]) or "none"
        raise BrokenStreamError(0, 0, f"{problem}{hint}; columns: {listed} (see --text-key)")
    kind = schema.field(text_key).type
    if not holds(kind):
        hint = ids_hint(text_key) if _holds_ids(kind) else ""
        raise BrokenStreamError(
            0, 0, f'column "{text_key}" is not of {content} but of {kind}{hint}'
        )


def _holds_ids(kind: Any) -> bool:
    """Whether a column of this Arrow type contains lists of integers."""
    from pyarrow import types

    is_list = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return any(test(kind) for test in is_list) and types.is_integer(kind.value_type)


def _holds_text(kind: Any) -> bool:
    """Whether a column of this Arrow type contains strings or bytes, also dictionary-encoded."""
    from pyarrow import types

    plain = kind.value_type if types.is_dictionary(kind) else kind
    tests = (
        *(types.is_string, types.is_large_string, types.is_string_view),
        *(types.is_binary, types.is_large_binary, types.is_binary_view),
    )
    return any(test(plain) for test in tests)


def record_of_value(source: Source, row: int, value: Any) -> Record | Reject:
    """The document of a row, from its Arrow scalar. `row` is counted from 1."""
    try:
        text = _ids_of_value(source, value) if source.ids else value.as_py()
        if isinstance(text, bytes):
            text = text.decode("utf-8")
    except UnicodeDecodeError as error:
        return source.reject(row, 0, f"invalid UTF-8 at byte {error.start} of the text")
    except BadRecordError as error:
        return source.reject(row, 0, error.reason)
    if text is None:
        return source.reject(row, 0, f'"{source.text_key}" is null')
    size = len(text.encode())
    if size > MAX_RECORD_BYTES:
        return source.reject(row, 0, too_long_error().reason)
    return Record.of(text, offset=row - 1, size=size, line=row)


def _ids_of_value(source: Source, value: Any) -> str | None:
    """The text of a list of ids; None for null. Raises BadRecordError."""
    from data_pipeline.readers.id_documents import text_of_document

    if not value.is_valid:
        return None
    values = value.values
    if values.null_count:
        raise BadRecordError(0, f'"{source.text_key}" has null among its ids')
    return text_of_document(values.to_numpy(zero_copy_only=False), source.id_rules)
