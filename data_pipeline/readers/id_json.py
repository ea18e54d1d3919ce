"""json: one JSON value per file that holds token ids, as MidiTok saves a song.

The file is an object with the ids at the key `--text-key`, or the ids alone. The ids are one list,
the document of this file, or a list of lists, such as one per track: a document each.

MidiTok's tokenizers with several vocabularies (Octuple, CPWord, MuMIDI) write a list per event,
which is no document and is refused. Their files have lists in the lists of tracks; or the key
"ids_encoded" with one value for the whole song; or, without that key, many short lists.

Source: MidiTok, `MusicTokenizer.save_tokens`, which writes the keys "ids" and "ids_encoded".
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
from data_pipeline.system.sources import reject_reason
from data_pipeline.system.strict_json import parse_json

_MAX_EVENT_IDS = _MIN_EVENTS = 16
"""MidiTok's events have 3 to 9 ids."""


def read_id_json(source: Source) -> Iterator[Record | Reject]:
    try:
        raw = read_exactly(source.stream, MAX_RECORD_BYTES + 1)
    except OSError as error:
        raise BrokenStreamError(0, 0, reject_reason(error)) from error
    try:
        content = _parse(raw)
        value = content if isinstance(content, list) else value_at(source.text_key, content)
        _reject_events(content, value)
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


def _parse(raw: bytes) -> Any:
    """The JSON value of the file. Raises BadRecordError."""
    if len(raw) > MAX_RECORD_BYTES:
        raise too_long_error()
    if not raw.strip():
        raise BadRecordError(0, "the file is empty")
    try:
        return parse_json(decode(raw))
    except BadRecordError:
        raise
    except (ValueError, RecursionError) as error:
        reason = printable(str(error))[:120]
        raise BadRecordError(getattr(error, "pos", 0), f"broken JSON ({reason})") from None


def _reject_events(content: Any, value: Any) -> None:
    """Raise BadRecordError if `value` has a list of ids per event; see the module docstring."""
    if not isinstance(value, list) or not all(isinstance(each, list) for each in value):
        return
    longest = max(map(len, value), default=0)
    encoded = content.get("ids_encoded") if isinstance(content, dict) else None
    has_events_in_tracks = any(each and isinstance(each[0], list) for each in value)
    is_one_song = isinstance(encoded, bool) and bool(value)
    has_short_lists = len(value) >= _MIN_EVENTS and longest <= _MAX_EVENT_IDS
    if has_events_in_tracks or is_one_song or (has_short_lists and not isinstance(encoded, list)):
        raise BadRecordError(
            0,
            f"{len(value):,} lists, at most {longest:,} long: one per event, as MidiTok's "
            "tokenizers with several vocabularies write (Octuple, CPWord, MuMIDI). A document is "
            "one list of ids of one vocabulary: use such a tokenizer (REMI, TSD), or make one list "
            "of each song and add to each id the sizes of the vocabularies before its own. If "
            "every list is a document, give JSON lines",
        )
