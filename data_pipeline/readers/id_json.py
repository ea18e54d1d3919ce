"""JSON files of token ids: one value per file, as MidiTok saves a song.

The file is an object with the ids at the key `--text-key`, or the ids alone. They are one list, the
document of this file, or a list of lists, such as one per track: a document each. A list of ids per
event is no document and is refused.
"""

from collections.abc import Iterator
from typing import Any

from data_pipeline.readers.ids import text_of_value
from data_pipeline.readers.lines import value_of_json
from data_pipeline.readers.records import (
    MAX_RECORD_BYTES,
    BadRecordError,
    Record,
    Reject,
    value_at,
)
from data_pipeline.readers.source import Source, read_exactly, too_long_error

_MAX_EVENT_IDS = _MIN_EVENTS = 16
"""MidiTok's events have 3 to 9 ids."""


def read_id_json(source: Source) -> Iterator[Record | Reject]:
    raw = read_exactly(source.stream, MAX_RECORD_BYTES + 1)
    try:
        if len(raw) > MAX_RECORD_BYTES:
            raise too_long_error()
        content = value_of_json(raw.rstrip() + b"\n")
        value = content if isinstance(content, list) else value_at(source.text_key, content)
        _reject_events(content, value)
    except BadRecordError as error:
        yield source.reject(0, error.byte, error.reason)
        return
    is_nested = isinstance(value, list) and bool(value) and isinstance(value[0], list)
    for line, each in enumerate(value if is_nested else [value], start=int(is_nested)):
        try:
            yield Record.of(text_of_value(each, source.id_rules, source.text_key), line=line)
        except BadRecordError as error:
            yield source.reject(line, 0, error.reason)


def _reject_events(content: Any, value: Any) -> None:
    """Raise BadRecordError if `value` has a list of ids per event.

    MidiTok's tokenizers with several vocabularies (Octuple, CPWord, MuMIDI) write such lists. Their
    files have lists in the lists of tracks; or the key "ids_encoded" with one value for the whole
    song; or, without that key, many short lists. Source: MidiTok, `MusicTokenizer.save_tokens`.
    """
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
            "one list of ids of one vocabulary: use another tokenizer (REMI, TSD). If every list "
            "is a document, give JSON lines",
        )
