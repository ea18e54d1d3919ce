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
import re
from collections.abc import Iterator
from itertools import accumulate

from data_pipeline.readers.records import (
    MAX_RECORD_BYTES,
    BadRecordError,
    IdRules,
    Record,
    RecordBlock,
    Reject,
    decode,
    value_at,
)
from data_pipeline.readers.source import (
    NUL_REASON,
    DocumentBuilder,
    LineBlock,
    Source,
    read_chunks,
    read_line_blocks,
    read_line_chunks,
    too_long_error,
)
from data_pipeline.system.strict_json import JSON_DECODER

HEAD_BYTES = 2**16
"""Bytes at the beginning of a file that decide whether it is text."""
_NAME_OF_IDS = re.compile(r".*\.(bin|npy|npz|idx)(\.\w+)?", re.IGNORECASE | re.DOTALL)
_IDS_REASON = (
    "binary, with the suffix of token ids: give --format ids --vocab-size N --end-of-document ID "
    "(and --dtype uint16 for a raw .bin file)"
)
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x1b"))


def read_text(source: Source) -> Iterator[Record | Reject]:
    document = None
    for chunk in read_chunks(source):
        document = document or DocumentBuilder(source, chunk.offset, line=0)
        document.add(chunk.raw)
    yield (document or DocumentBuilder(source, 0, line=0)).build()


def read_binary(source: Source) -> Iterator[Record | Reject]:
    head = source.stream.read(HEAD_BYTES)
    reason = NUL_REASON if b"\0" in head else "binary: it has many control characters"
    if _NAME_OF_IDS.fullmatch(source.name):
        reason = _IDS_REASON
    yield source.reject(0, max(head.find(b"\0"), 0), reason)


def is_binary(head: bytes) -> bool:
    """Whether the first HEAD_BYTES of a file are not those of a text."""
    return b"\0" in head or 10 * len(head.translate(None, _CONTROLS)) < 9 * len(head)


def read_lines(source: Source) -> Iterator[Record | RecordBlock | Reject]:
    document: DocumentBuilder | None = None
    for piece in read_line_blocks(source):
        if isinstance(piece, LineBlock):
            yield from _read_block(source, piece)
            continue
        ends_line = piece.raw.endswith(b"\n")
        text = piece.raw[:-1].removesuffix(b"\r") if ends_line else piece.raw
        if text and not document:
            document = DocumentBuilder(source, piece.offset, piece.line)
        if document:
            document.add(text)
        if document and ends_line:
            yield document.build()
            document = None
    if document:
        yield document.build()


def _read_block(source: Source, block: LineBlock) -> Iterator[RecordBlock | Record | Reject]:
    texts = block.raw.split(b"\n")[:-1]
    offsets = list(accumulate((len(text) + 1 for text in texts), initial=block.offset))
    if b"\r" in block.raw:
        texts = [text.removesuffix(b"\r") for text in texts]
    documents = [
        (text, offset, line)
        for line, (text, offset) in enumerate(zip(texts, offsets, strict=False), block.line)
        if text
    ]
    if not documents:
        return
    try:
        block.raw.decode("utf-8")
        is_good = source.keeps_nul or b"\0" not in block.raw
    except UnicodeDecodeError:
        is_good = False
    if is_good:
        yield RecordBlock(*map(list, zip(*documents, strict=True)))
    else:  # find the lines at fault
        for text, offset, line in documents:
            document = DocumentBuilder(source, offset, line)
            document.add(text)
            yield document.build()


def read_blank_lines(source: Source) -> Iterator[Record | Reject]:
    document: DocumentBuilder | None = None
    # A document belongs to the range with the last blank line before it.
    is_ours = source.start == 0
    for chunk in read_line_chunks(source, past_stop=True):
        if chunk.starts_line and not chunk.raw.strip():
            if document:
                yield document.build()
                document = None
            if not chunk.in_range:
                return
            is_ours = True
        elif document or is_ours:
            document = document or DocumentBuilder(source, chunk.offset, chunk.line)
            document.add(chunk.raw)
        elif not chunk.in_range:
            return
    if document:
        yield document.build()


def read_jsonl(source: Source) -> Iterator[Record | Reject]:
    parts: list[bytes] = []
    offset = line = size = 0
    for chunk in read_line_chunks(source):
        if chunk.starts_line:
            parts, size, offset, line = [], 0, chunk.offset, chunk.line
        size += len(chunk.raw)
        if size <= MAX_RECORD_BYTES:
            parts.append(chunk.raw)
        else:
            parts.clear()
        if chunk.raw.endswith(b"\n"):
            yield from _record_of_line(source, offset, line, size, parts)
            parts, size = [], 0
    yield from _record_of_line(source, offset, line, size, parts)


def _record_of_line(
    source: Source, offset: int, line: int, size: int, parts: list[bytes]
) -> Iterator[Record | Reject]:
    """The document of a line; yields nothing for a blank line."""
    raw = b"".join(parts)
    try:
        if size > MAX_RECORD_BYTES:
            raise too_long_error()
        if raw.strip():
            text = text_of_line(raw, source.text_key, source.ids)
            yield Record.of(text, offset=offset, size=size, line=line)
    except BadRecordError as error:
        yield source.reject(line, offset + error.byte, error.reason)


def text_of_line(raw: bytes, text_key: str, ids: IdRules | None = None) -> str:
    """The document's text in a line of JSON, or that of its token ids. Raises BadRecordError."""
    line = decode(raw)
    try:
        content = JSON_DECODER.decode(line)
    except json.JSONDecodeError as error:
        byte = len(line[: error.pos].encode())
        cut = not raw.endswith(b"\n")
        kind = "truncated record: the file ends inside a line" if cut else "broken JSON"
        raise BadRecordError(byte, f"{kind} ({error.msg})") from None
    except (ValueError, RecursionError) as error:  # keys twice, huge integers, deep nesting
        raise BadRecordError(0, f"unreadable JSON ({str(error)[:80]})") from None
    text = value_at(text_key, content)
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
