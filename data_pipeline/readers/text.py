"""Documents of text files, and of rows that are lines of WikiText.

text: a file is one document, with its path as id. The text is not changed.
lines: every line that is not empty is a document, without the LF or CR LF at its end.
blank_lines: documents are separated by blank lines, which are empty or whitespace. The lines of a
document keep their ends.
jsonl: every line is a JSON object with the document's text at the key `--text-key`, or with
`--format ids` a list of token ids.
json: with `--format ids`, a file with one list of token ids, or a list of such lists.
wikitext: the articles of a WikiText file, each from its title line to the next title.
` = Title = ` is a title, ` = = Section = = ` is not. Text before the first title is a separate
document; blank lines there belong to the first article, so that no line of the file is lost.
wikitext_rows: the same from a Parquet or Arrow file with one line per row, as Hugging Face has
WikiText. The rows, joined, are the original file: an empty row is the line " \\n". An article may
continue in the next shard (train-00001-of-00002), so consecutive shards are read as one file.
binary: a file that is not text, which is rejected. A file is binary if its first bytes contain NUL,
or if more than a tenth of them are control characters other than those of texts: tab, line breaks,
vertical tab, form feed, backspace and escape. NUL later in a file rejects its document, too. With
`--format text` all bytes are text.

Source: Merity et al. 2016, arXiv:1609.07843, the files of WikiText-2 and WikiText-103; the loading
script `wikitext.py` of Hugging Face, which writes the rows.
"""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from data_pipeline.readers.columns import text_of_scalar, values_of
from data_pipeline.readers.ids import text_of_value
from data_pipeline.readers.source import (
    CHUNK_BYTES,
    MAX_RECORD_BYTES,
    NUL_REASON,
    BadRecordError,
    BrokenStreamError,
    DocumentBuilder,
    IdRules,
    InputFile,
    Line,
    Record,
    Reject,
    Source,
    decode,
    lines_of,
    read_exactly,
    value_at,
)
from data_pipeline.system.sources import open_source, reject_reason, shown
from data_pipeline.system.strict_json import JSON_DECODER

HEAD_BYTES = 2**16
"""Bytes at the beginning of a file that decide whether it is text."""
MAX_TITLE_BYTES = 4096
_IDS_REASON = (
    "binary, with the suffix of token ids: give --format ids --vocab-size N --end-of-document ID "
    "(and --dtype uint16 for a raw .bin file)"
)
_MAX_EVENT_IDS = _MIN_EVENTS = 16
"""MidiTok's events have 3 to 9 ids."""
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x1b"))
_MAX_ROWS_EXAMINED = 4096
"""Rows at the beginning of a file that show whether its rows are lines. A shard may begin inside a
long article."""
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})(?P<total>-of-\d{5})(?P<suffix>\.\w+)")


def read_text(source: Source) -> Iterator[Record | Reject]:
    body = source.stream.read(CHUNK_BYTES)
    document = DocumentBuilder(source, len(BOM_UTF8) * body.startswith(BOM_UTF8), line=0)
    document.add(body.removeprefix(BOM_UTF8))
    while body := source.stream.read(CHUNK_BYTES):
        document.add(body)
    yield document.build()


def read_binary(source: Source) -> Iterator[Record | Reject]:
    head = source.stream.read(HEAD_BYTES)
    reason = NUL_REASON if b"\0" in head else "binary: it has many control characters"
    if source.file.suffix.name in (".bin", ".npy", ".npz", ".idx"):
        reason = _IDS_REASON
    yield source.reject(0, max(head.find(b"\0"), 0), reason)


def is_binary(head: bytes) -> bool:
    """Whether the first HEAD_BYTES of a file are not those of a text."""
    return b"\0" in head or 10 * len(head.translate(None, _CONTROLS)) < 9 * len(head)


def read_lines(source: Source) -> Iterator[Record | Reject]:
    for byte, line, raw in lines_of(source):
        content = raw[:-1].removesuffix(b"\r") if raw.endswith(b"\n") else raw
        if content:
            yield source.record(source.decode, content, line=line, byte=byte)


def read_blank_lines(source: Source) -> Iterator[Record | Reject]:
    document: DocumentBuilder | None = None
    for byte, line, raw in lines_of(source):
        if raw.strip():
            document = document or DocumentBuilder(source, byte, line)
            document.add(raw)
        elif document:
            yield document.build()
            document = None
    if document:
        yield document.build()


# --- JSON -----------------------------------------------------------------------------------------


def read_jsonl(source: Source) -> Iterator[Record | Reject]:
    text_of = partial(text_of_line, text_key=source.text_key, ids=source.file.ids)
    for byte, line, raw in lines_of(source):
        if raw.strip():
            yield source.record(text_of, raw, line=line, byte=byte)


def read_id_json(source: Source) -> Iterator[Record | Reject]:
    """A file with one value, as MidiTok saves a song: ids, or a list of them such as one per track.

    They are the value at the key, or the whole file.
    """
    text_of = partial(text_of_value, rules=source.id_rules, name=source.text_key)
    raw = read_exactly(source.stream, MAX_RECORD_BYTES + 1)
    try:
        content = value_of_json(raw.rstrip() + b"\n")
        value = content if isinstance(content, list) else value_at(source.text_key, content)
        _reject_events(value)
    except BadRecordError as error:
        yield source.reject(0, error.byte, error.reason)
        return
    is_nested = isinstance(value, list) and bool(value) and isinstance(value[0], list)
    for line, each in enumerate(value if is_nested else [value], start=int(is_nested)):
        yield source.record(text_of, each, line=line)


def _reject_events(value: Any) -> None:
    """Raise BadRecordError for many short lists: ids of several vocabularies, a list per event.

    Source: MidiTok, `MusicTokenizer.save_tokens`.
    """
    if not isinstance(value, list) or not all(isinstance(each, list) for each in value):
        return
    longest = max(map(len, value), default=0)
    if len(value) >= _MIN_EVENTS and longest <= _MAX_EVENT_IDS:
        raise BadRecordError(
            f"{len(value):,} lists, at most {longest:,} long: one per event, as MidiTok's "
            "tokenizers with several vocabularies write (Octuple, CPWord, MuMIDI). A document is "
            "one list of ids of one vocabulary: use another tokenizer (REMI, TSD). If every list "
            "is a document, give JSON lines"
        )


def text_of_line(raw: bytes, text_key: str, ids: IdRules | None = None) -> str:
    """The document's text in a line of JSON, or that of its token ids. Raises BadRecordError."""
    text = value_at(text_key, value_of_json(raw))
    if ids:
        return text_of_value(text, ids, text_key)
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        hint = " (for token ids: --format ids)" * isinstance(text, list)
        raise BadRecordError(f'"{text_key}" is not a string but {kind}{hint}')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can contain it, UTF-8 cannot
        code, place = ord(text[error.start]), f"character {error.start} of the text"
        raise BadRecordError(f"lone surrogate U+{code:04X} at {place}") from None
    return text


def value_of_json(raw: bytes) -> Any:
    """The JSON value of a line. Raises BadRecordError."""
    line = decode(raw)
    try:
        return JSON_DECODER.decode(line)
    except json.JSONDecodeError as error:
        byte = len(line[: error.pos].encode())
        cut = not raw.endswith(b"\n")
        kind = "truncated record: the file ends inside a line" if cut else "broken JSON"
        raise BadRecordError(f"{kind} ({error.msg})", byte=byte) from None
    except (ValueError, RecursionError) as error:  # keys twice, huge integers, deep nesting
        raise BadRecordError(f"unreadable JSON ({str(error)[:80]})") from None


# --- WikiText -------------------------------------------------------------------------------------


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
    for byte, line, raw in lines:
        if document and not is_blank and is_title(raw):
            yield document.build()
            document = None
        document = document or DocumentBuilder(source, byte, line)
        document.add(raw)
        is_blank = is_blank and not raw.strip()
    if document and not is_blank:
        yield document.build()


def _lines_of_rows(source: Source) -> Iterator[Line]:
    number = 0
    for path in (source.file.path, *source.file.next_paths):
        with open_source(path, "") as stream:
            shard = Source(replace(source.file, path=path), source.text_key, stream=stream)
            for raw in _rows_of_file(shard):
                number += 1
                yield Line(0, number, raw)
    source.lines = number


def _rows_of_file(source: Source) -> Iterator[bytes]:
    try:
        for value in values_of(source):
            line = text_of_scalar(source, value).encode() or b" \n"
            if line.find(b"\n") != len(line) - 1:
                raise BadRecordError("it is not one line")
            yield line
    except (BadRecordError, BrokenStreamError, OSError) as error:  # without it: an article's gap
        row = f"row {source.lines}: " if isinstance(error, BadRecordError) else ""
        reason = reject_reason(error) if isinstance(error, OSError) else error.reason
        reason = f"{shown(source.file.path)}: {row}{reason}"
        raise BrokenStreamError(reason, line=source.lines) from error


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
