"""json: one JSON value per file that holds token ids, as MidiTok saves a song.

The file is an object with the ids at the key `--text-key`, or the ids alone. The ids are one list,
the document of this file, or a list of lists, such as one per track: a document each.

Source: MidiTok, `MusicTokenizer.save_tokens`, which writes the key "ids".
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
    decode,
    value_at,
)
from data_pipeline.readers.source import Source, read_exactly, too_long_error
from data_pipeline.readers.token_ids import text_of_value
from data_pipeline.storage import strict_json
from data_pipeline.storage.source_errors import reject_reason


def read_id_json(source: Source) -> Iterator[Record | Reject]:
    try:
        raw = read_exactly(source.stream, MAX_RECORD_BYTES + 1)
    except OSError as error:
        raise BrokenStreamError(0, 0, reject_reason(error)) from error
    try:
        value = _ids_of(raw, source.text_key)
    except BadRecordError as error:
        yield source.reject(0, error.byte, error.reason)
        return
    is_nested = isinstance(value, list) and bool(value) and isinstance(value[0], list)
    for line, each in enumerate(value if is_nested else [value], start=int(is_nested)):
        try:
            text = text_of_value(each, source.id_rules, source.text_key)
        except BadRecordError as error:
            yield source.reject(line, 0, error.reason)
        else:
            yield Record.of(text, offset=max(line - 1, 0), size=len(text), line=line)


def _ids_of(raw: bytes, key: str) -> Any:
    """The value at `key`, or the whole value if it is a list. Raises BadRecordError."""
    if len(raw) > MAX_RECORD_BYTES:
        raise too_long_error()
    if not raw.strip():
        raise BadRecordError(0, "the file is empty")
    try:
        content = strict_json.parse(decode(raw))
    except BadRecordError:
        raise
    except (ValueError, RecursionError) as error:
        reason = printable(str(error))[:120]
        raise BadRecordError(getattr(error, "pos", 0), f"broken JSON ({reason})") from None
    if isinstance(content, list):
        return content
    return value_at(key, content)
