"""wikitext: the articles of a WikiText file, each from its title line to the next title.

` = Title = ` is a title, ` = = Section = = ` is not. Text before the first title is a separate
document; blank lines there belong to the first article, so that no line of the file is lost.

wikitext_rows: the same from a Parquet or Arrow file with one line per row, as Hugging Face has
WikiText. The rows, joined, are the original file: an empty row is the line " \\n". An article may
continue in the next shard (train-00001-of-00002), so consecutive shards are read as one file.

Source: Merity et al. 2016, arXiv:1609.07843, the files of WikiText-2 and WikiText-103; the loading
script `wikitext.py` of Hugging Face, which writes the rows.
"""

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from data_pipeline.readers.columns import read_arrow, read_parquet
from data_pipeline.readers.records import BrokenStreamError, Record, Reject
from data_pipeline.readers.source import DocumentBuilder, Source, lines_of
from data_pipeline.system.sources import open_source, reject_reason, shown

MAX_TITLE_BYTES = 4096
_BLANK_LINE = b" \n"
_MAX_ROWS_EXAMINED = 4096
"""Rows at the beginning of a file that show whether its rows are lines. A shard may begin inside a
long article."""
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})(?P<total>-of-\d{5})(?P<suffix>\.\w+)")


def is_title(line: bytes) -> bool:
    inner = line.strip()
    return (
        line.startswith(b" = ")
        and len(line) <= MAX_TITLE_BYTES
        and len(inner) > 4
        and inner.endswith(b" =")
        and not inner.startswith(b"= =")
        and not inner.endswith(b"= =")
    )


def read_wikitext(source: Source) -> Iterator[Record | Reject]:
    document: DocumentBuilder | None = None
    is_blank = True  # the lines of `document`
    for offset, line, raw in lines_of(source):
        if document and not is_blank and is_title(raw):
            yield document.build()
            document = None
        document = document or DocumentBuilder(source, offset, line)
        document.add(raw)
        is_blank = is_blank and not raw.strip()
    if document and not is_blank:
        yield document.build()


def read_wikitext_rows(source: Source) -> Iterator[Record | Reject]:
    lines = replace(source, stream=io.BufferedReader(_RowStream(source)), lines=0)
    yield from read_wikitext(lines)
    source.lines = lines.lines


class _RowStream(io.RawIOBase):
    """The original file, of which every row is a line."""

    def __init__(self, source: Source) -> None:
        self._rows, self._rest = _rows(source), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        raw = self._rest or next(self._rows, b"")
        size = min(len(raw), len(buffer))
        buffer[:size], self._rest = raw[:size], raw[size:]
        return size


def _rows(source: Source) -> Iterator[bytes]:
    """The lines of all shards."""
    yield from _rows_of_file(source)
    for path in source.file.next_paths:
        with open_source(path, "") as stream:
            file = replace(source.file, path=path)
            yield from _rows_of_file(replace(source, file=file, stream=stream, lines=0))


def _rows_of_file(source: Source) -> Iterator[bytes]:
    read = read_parquet if source.file.path.endswith((".parquet", ".pq")) else read_arrow
    try:
        for row in read(source):
            if isinstance(row, Reject):  # without it, the article would have a gap
                raise BrokenStreamError(row.line, 0, f"row {row.line}: {row.reason}")
            yield (row.text or "").encode() or _BLANK_LINE
    except (BrokenStreamError, OSError) as error:
        reason = error.reason if isinstance(error, BrokenStreamError) else reject_reason(error)
        place = f"{shown(source.file.path)}: "
        raise BrokenStreamError(source.lines, 0, place + reason) from error


def has_wikitext_rows(source: Source) -> bool:
    """Whether the rows of a Parquet or Arrow file are lines of WikiText, one of them a title.

    Raises OSError or BrokenStreamError.
    """
    has_title = False
    for row in islice(_rows_of_file(source), _MAX_ROWS_EXAMINED):
        if not row.endswith(b"\n") or row.count(b"\n") > 1:
            return False
        has_title = has_title or is_title(row)
    return has_title


def next_shard(name: str) -> str:
    """The name of the shard after `name`; "" if it is not the name of a shard."""
    shard = _SHARD.fullmatch(name)
    if not shard:
        return ""
    return f"{shard['stem']}-{int(shard['number']) + 1:05}{shard['total']}{shard['suffix']}"


def name_of_shards(name: str) -> str:
    """train.parquet for the shard train-00000-of-00002.parquet."""
    return _SHARD.sub(r"\g<stem>\g<suffix>", name)
