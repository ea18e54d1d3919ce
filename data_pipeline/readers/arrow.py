"""arrow: every row of an Arrow IPC stream is a document, as `datasets.save_to_disk` writes it.

The text, or the list of token ids, is in the column `--text-key`. The file format of Arrow (Feather
version 2) is read as well: it is a stream between a magic number and a footer. A stream must have
its end mark, because one that is cut between two messages is otherwise valid.

Source: Apache Arrow, "Arrow Columnar Format", section "IPC Streaming Format".
"""

from collections.abc import Iterator
from typing import Any, BinaryIO

from data_pipeline.errors import printable
from data_pipeline.readers.parquet import record_of_value, require_column
from data_pipeline.readers.records import BrokenStreamError, Record, Reject
from data_pipeline.readers.source import Source, read_exactly
from data_pipeline.system.sources import SourceError

_MAGIC = b"ARROW1"
_END_MARK = b"\xff\xff\xff\xff\0\0\0\0"


class _Tail:
    """A stream for pyarrow that keeps the last bytes that were read."""

    closed = False

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.last = stream, b""

    def read(self, size: int = -1) -> bytes:
        raw = read_exactly(self._stream, size)
        self.last = (self.last + raw)[-len(_END_MARK) :] if raw else b""
        return raw


def read_arrow(source: Source) -> Iterator[Record | Reject]:
    import pyarrow

    try:
        for value in _values(source):
            source.lines += 1
            yield record_of_value(source, source.lines, value)
    except SourceError as error:
        raise BrokenStreamError(source.lines + 1, 0, error.reason) from error
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError, TypeError) as error:
        if isinstance(error, BrokenStreamError):
            raise
        reason = printable(str(error).split("\n")[0])[:200]
        line = source.lines + bool(source.lines)
        raise BrokenStreamError(line, 0, f"damaged Arrow file: {reason}") from error


def _values(source: Source) -> Iterator[Any]:
    """The values of the column, as Arrow scalars that are safe to read."""
    import pyarrow

    is_file = source.stream.peek(len(_MAGIC))[: len(_MAGIC)] == _MAGIC  # type: ignore[attr-defined]
    if is_file:
        source.stream.read(len(_MAGIC) + 2)
    tail = _Tail(source.stream)
    reader = pyarrow.ipc.open_stream(pyarrow.PythonFile(tail, mode="r"))
    require_column(reader.schema, source)
    for batch in reader:
        column = _checked(batch.column(reader.schema.names.index(source.text_key)))
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


def _checked(column: Any) -> Any:
    """The column after a check of all offsets, which pyarrow otherwise trusts.

    Strings become bytes first, so that invalid UTF-8 rejects one row, not the batch.
    """
    import pyarrow

    as_bytes = {
        pyarrow.string(): pyarrow.binary(),
        pyarrow.large_string(): pyarrow.large_binary(),
        pyarrow.string_view(): pyarrow.binary_view(),
    }.get(column.type)
    column = column.view(as_bytes) if as_bytes else column
    column.validate(full=True)
    return column
