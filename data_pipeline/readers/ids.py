"""Token ids as documents: which integers are valid, their form as text, and ids in JSON files.

A document of ids has a text like any other document: its ids as decimal numbers, separated by
single spaces, "60 62 64". Everything after the readers (hashes, deduplication, shuffling, resuming)
therefore treats both alike, and `tokenizers/ids.py` encodes this text to the same ids.

The end-of-document id may be at the beginning and end of a document, as some programs write it.
It is dropped there, because every tokenized document gets one. Inside a document it is an error.
The same holds for the id that fills up rows (`--padding`), if there is one.

json: one JSON value per file, as MidiTok saves a song: an object with the ids at the key
`--text-key`, or the ids alone. They are one list, the document of this file, or a list of lists,
such as one per track: a document each. A list of ids per event is no document and is refused.

Arrays are in `id_arrays.py`: this module imports no numpy, so that `txl --help` is fast.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from data_pipeline.errors import printable
from data_pipeline.readers.records import (
    MAX_RECORD_BYTES,
    BadRecordError,
    Record,
    Reject,
    decode,
    value_at,
)
from data_pipeline.readers.source import Source, read_exactly, too_long_error
from data_pipeline.system.sources import file_system, retry_request, scheme_of
from data_pipeline.system.strict_json import parse_json

_MAX_EVENT_IDS = _MIN_EVENTS = 16
"""MidiTok's events have 3 to 9 ids."""


@dataclass(frozen=True, slots=True)
class IdRules:
    """The ids that an input may contain, and how raw arrays store them."""

    vocab_size: int
    end_of_document: int
    dtype: str = ""
    """NumPy name of the integers of an array file, such as "<u2"; "" if unknown."""
    padding: int | None = None
    """The id that fills up documents; None if it is not known whether there is one."""

    def unknown(self, id_: object, position: int) -> BadRecordError:
        """The error for an id that is not in the vocabulary."""
        return BadRecordError(
            0,
            f"token id {str(id_)[:40]} at position {position:,} is not in the vocabulary of "
            f"{self.vocab_size} ids, 0 to {self.vocab_size - 1}",
        )

    def inner_end(self, position: int) -> BadRecordError:
        """The error for an end-of-document or padding id inside a document."""
        name = f"end-of-document id {self.end_of_document}"
        if self.padding is not None:
            name = f"{name} or padding id {self.padding}"
        return BadRecordError(
            0,
            f"the {name} at position {position:,} is inside the document; split the document there",
        )


def text_of_value(value: object, rules: IdRules, name: str) -> str:
    """The text of a list of integers, the value of `name`. Raises BadRecordError."""
    if not isinstance(value, list):
        kind = "null" if value is None else type(value).__name__
        raise BadRecordError(0, f'"{name}" is not a list of token ids but {kind}')
    for position, each in enumerate(value):
        if type(each) is not int:  # bool is an int, too
            hint = "; give every track a line, and ids of one vocabulary"
            hint *= isinstance(each, list)
            kind = "null" if each is None else type(each).__name__
            reason = f'"{name}" has {kind} at position {position}, not a token id{hint}'
            raise BadRecordError(0, reason)
        if not 0 <= each < rules.vocab_size:
            raise rules.unknown(each, position)
    import numpy as np

    from data_pipeline.readers.id_arrays import text_of_document

    return text_of_document(np.array(value, np.int64), rules)


def read_id_json(source: Source) -> Iterator[Record | Reject]:
    raw = read_exactly(source.stream, MAX_RECORD_BYTES + 1)
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


def index_path(path: str) -> str:
    """The path or URL of the .idx file with the bounds of the documents in a .bin file."""
    return path.removesuffix(".bin") + ".idx"


def has_index(path: str) -> bool:
    """Whether the .bin file at `path` and an index are a pair (`indexed_ids.py`)."""
    other = index_path(path)
    if not scheme_of(path):
        return os.path.exists(other)  # noqa: PTH110 - as the other checks of listed files
    system = file_system(other)
    return bool(retry_request(lambda: system.exists(other)))
