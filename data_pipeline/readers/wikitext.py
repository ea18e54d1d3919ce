"""wikitext: the articles of a WikiText file, each from its title line to the next title.

` = Title = ` is a title, ` = = Section = = ` is not. Text before the first title is a separate
document; blank lines there belong to the first article, so that no line of the file is lost.

wikitext_rows: the same from a Parquet or Arrow file with one line per row, as Hugging Face has
WikiText. The rows, joined, are the original file: an empty row is the line " \\n". An article may
continue in the next shard (train-00001-of-00002), so consecutive shards are read as one file.

Source: Merity et al. 2016, arXiv:1609.07843, the files of WikiText-2 and WikiText-103; the loading
script `wikitext.py` of Hugging Face, which writes the rows.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from data_pipeline.readers.columns import read_arrow, read_parquet
from data_pipeline.readers.input_file import InputFile
from data_pipeline.readers.records import BrokenStreamError, Record, Reject
from data_pipeline.readers.source import DocumentBuilder, Line, Source, lines_of
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
    return _articles(source, lines_of(source))


def read_wikitext_rows(source: Source) -> Iterator[Record | Reject]:
    return _articles(source, _lines_of_rows(source))


def _articles(source: Source, lines: Iterable[Line]) -> Iterator[Record | Reject]:
    document: DocumentBuilder | None = None
    is_blank = True  # the lines of `document`
    for offset, line, raw in lines:
        if document and not is_blank and is_title(raw):
            yield document.build()
            document = None
        document = document or DocumentBuilder(source, offset, line)
        document.add(raw)
        is_blank = is_blank and not raw.strip()
    if document and not is_blank:
        yield document.build()


def _lines_of_rows(source: Source) -> Iterator[Line]:
    """The lines of all shards."""
    number = 0
    for path in (source.file.path, *source.file.next_paths):
        with open_source(path, "") as stream:
            shard = Source(replace(source.file, path=path), source.text_key, stream=stream)
            for raw in _rows_of_file(shard):
                number += 1
                yield Line(0, number, raw)
    source.lines = number


def _rows_of_file(source: Source) -> Iterator[bytes]:
    read = read_parquet if source.file.path.endswith((".parquet", ".pq")) else read_arrow
    try:
        for row in read(source):
            if isinstance(row, Reject):  # without it, the article would have a gap
                raise BrokenStreamError(row.line, 0, f"row {row.line}: {row.reason}")
            line = (row.text or "").encode() or _BLANK_LINE
            if line.find(b"\n") != len(line) - 1:
                raise BrokenStreamError(row.line, 0, f"row {row.line}: it is not one line")
            yield line
    except (BrokenStreamError, OSError) as error:
        reason = error.reason if isinstance(error, BrokenStreamError) else reject_reason(error)
        place = f"{shown(source.file.path)}: "
        raise BrokenStreamError(source.lines, 0, place + reason) from error


def has_wikitext_rows(file: InputFile, text_key: str) -> bool:
    """Whether the first rows of a Parquet or Arrow file are lines of WikiText, one of them a title.

    False if it cannot be read, which its reader reports.
    """
    try:
        with file.open() as stream:
            rows = _rows_of_file(Source(file, text_key, stream=stream))
            return True in [is_title(row) for row in islice(rows, _MAX_ROWS_EXAMINED)]
    except (OSError, BrokenStreamError):
        return False


def next_shard(name: str) -> str:
    """The name of the shard after `name`; "" if it is not the name of a shard."""
    shard = _SHARD.fullmatch(name)
    if not shard:
        return ""
    return f"{shard['stem']}-{int(shard['number']) + 1:05}{shard['total']}{shard['suffix']}"


def name_of_shards(name: str) -> str:
    """train.parquet for the shard train-00000-of-00002.parquet."""
    return _SHARD.sub(r"\g<stem>\g<suffix>", name)
