"""Documents of text files: text, lines, blank_lines and jsonl.

text: a file is one document, with its path as id. The text is not changed.
lines: every line that is not empty is a document, without the LF or CR LF at its end.
blank_lines: documents are separated by blank lines, which are empty or whitespace. The lines of a
document keep their ends.
jsonl: every line is a JSON object with the document's text at the key `--text-key`, or with
`--format ids` a list of token ids.
binary: a file that is not text, which is rejected. A file is binary if its first bytes contain NUL,
or if more than a tenth of them are control characters other than those of texts: tab, line breaks,
vertical tab, form feed, backspace and escape. NUL later in a file rejects its document, too. With
`--format text` all bytes are text.
"""

import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import Any

from data_pipeline.readers.records import (
    BadRecordError,
    IdRules,
    Record,
    Reject,
    decode,
    value_at,
)
from data_pipeline.readers.source import (
    CHUNK_BYTES,
    NUL_REASON,
    DocumentBuilder,
    Source,
    lines_of,
)
from data_pipeline.system.strict_json import JSON_DECODER

HEAD_BYTES = 2**16
"""Bytes at the beginning of a file that decide whether it is text."""
_IDS_REASON = (
    "binary, with the suffix of token ids: give --format ids --vocab-size N --end-of-document ID "
    "(and --dtype uint16 for a raw .bin file)"
)
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x1b"))


def read_text(source: Source) -> Iterator[Record | Reject]:
    raw = source.stream.read(CHUNK_BYTES)
    body = raw.removeprefix(BOM_UTF8)
    document = DocumentBuilder(source, len(raw) - len(body), line=0)
    while body:
        document.add(body)
        body = source.stream.read(CHUNK_BYTES)
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
    for offset, line, raw in lines_of(source):
        content = raw[:-1].removesuffix(b"\r") if raw.endswith(b"\n") else raw
        if content:
            yield source.record(content, source.decode, offset=offset, line=line)


def read_blank_lines(source: Source) -> Iterator[Record | Reject]:
    document: DocumentBuilder | None = None
    for offset, line, raw in lines_of(source):
        if raw.strip():
            document = document or DocumentBuilder(source, offset, line)
            document.add(raw)
        elif document:
            yield document.build()
            document = None
    if document:
        yield document.build()


def read_jsonl(source: Source) -> Iterator[Record | Reject]:
    def text_of(raw: bytes) -> str:
        return text_of_line(raw, source.text_key, source.file.ids)

    for offset, line, raw in lines_of(source):
        if raw.strip():
            yield source.record(raw, text_of, offset=offset, line=line)


def text_of_line(raw: bytes, text_key: str, ids: IdRules | None = None) -> str:
    """The document's text in a line of JSON, or that of its token ids. Raises BadRecordError."""
    text = value_at(text_key, value_of_json(raw))
    if ids:
        from data_pipeline.readers.ids import text_of_value  # needs numpy, which is slow to import

        return text_of_value(text, ids, text_key)
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        hint = " (for token ids: --format ids)" * isinstance(text, list)
        raise BadRecordError(0, f'"{text_key}" is not a string but {kind}{hint}')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can contain it, UTF-8 cannot
        code = ord(text[error.start])
        reason = f"lone surrogate U+{code:04X} at character {error.start} of the text"
        raise BadRecordError(0, reason) from None
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
        raise BadRecordError(byte, f"{kind} ({error.msg})") from None
    except (ValueError, RecursionError) as error:  # keys twice, huge integers, deep nesting
        raise BadRecordError(0, f"unreadable JSON ({str(error)[:80]})") from None
