"""jsonl: every line is a JSON object with the document's text at the key `--text-key`.

With `--format ids` the key holds a list of token ids.
"""

import json
from collections.abc import Iterator

from data_pipeline.readers.records import (
    MAX_RECORD_BYTES,
    BadRecordError,
    Record,
    Reject,
    decode,
    has_ids,
    ids_hint,
    value_at,
)
from data_pipeline.readers.source import Source, read_line_chunks, too_long_error
from data_pipeline.readers.token_ids import IdRules, text_of_value
from data_pipeline.system.strict_json import JSON_DECODER, DuplicateKeyError


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
            yield from _record(source, offset, line, size, parts)
            parts, size = [], 0
    yield from _record(source, offset, line, size, parts)


def _record(
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
    except DuplicateKeyError as error:
        raise BadRecordError(0, str(error)) from None
    except (ValueError, RecursionError) as error:  # huge integers, deep nesting
        raise BadRecordError(0, f"unreadable JSON ({str(error)[:80]})") from None
    text = value_at(text_key, content)
    if ids:
        return text_of_value(text, ids, text_key)
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        hint = ids_hint(text_key) if has_ids(text) else ""
        raise BadRecordError(0, f'"{text_key}" is not a string but {kind}{hint}')
    _require_unicode(text)
    return text


def _require_unicode(text: str) -> None:
    """Raise BadRecordError for a lone surrogate, which JSON can contain and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        reason = f"lone surrogate U+{code:04X} at character {error.start} of the text"
        raise BadRecordError(0, reason) from None
