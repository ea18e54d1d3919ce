"""Token ids as documents: their text, JSON files, and the arrays .bin and .npy.

A document of ids has a text like any other document: its ids as decimal numbers, separated by
single spaces, "60 62 64". Everything after the readers (hashes, deduplication, shuffling, resuming)
therefore treats both alike, and `tokenizers/ids.py` encodes this text to the same ids.

The end-of-document id may be at the beginning and end of a document, as some programs write it.
It is dropped there, because every tokenized document gets one. Inside a document it is an error.
The same holds for the id that fills up rows (`--padding`), if there is one.

json: one value per file, as MidiTok saves a song: an object with the ids at the key `--text-key`,
or the ids alone. They are one list, the document of this file, or a list of lists, such as one per
track: a document each. A list of ids per event is no document and is refused.

bin, npy: a raw file (`--dtype`, little-endian) or an array of one dimension is a stream of ids, in
which the end-of-document id separates documents. Every row of an array of two dimensions is a
document; a row of one id only is probably padding and rejected, unless it is known which id is
padding. Arrays are never unpickled.

Plain arrays are cut into byte ranges that can be read independently; a document belongs to the
range that contains its first id.
"""

import functools
import io
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from data_pipeline.errors import printable
from data_pipeline.readers.lines import value_of_json
from data_pipeline.readers.records import (
    MAX_RECORD_BYTES,
    BadRecordError,
    BrokenStreamError,
    IdRules,
    Record,
    Reject,
    value_at,
)
from data_pipeline.readers.source import (
    CHUNK_BYTES,
    DocumentBuilder,
    Source,
    read_exactly,
    too_long_error,
)

_MAX_EVENT_IDS = _MIN_EVENTS = 16
"""MidiTok's events have 3 to 9 ids."""


# --- the text of ids ------------------------------------------------------------------------------


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
    return text_of_document(np.array(value, np.int64), rules)


def text_of_document(ids: np.ndarray, rules: IdRules) -> str:
    """The text of a 1-D array of integers, without the ids that `_content_bounds` drops.

    Raises BadRecordError for an id outside the vocabulary, or one of these ids inside the document.
    """
    first, stop = _content_bounds(ids, rules, 0)
    return _text_of_array(ids[first:stop], rules, first)


def _text_of_array(ids: np.ndarray, rules: IdRules, position: int) -> str:
    """The text of all ids. `position` is that of the first id in its document."""
    if ids.size and (ids.min() < 0 or ids.max() >= rules.vocab_size):
        first = int(np.flatnonzero((ids < 0) | (ids >= rules.vocab_size))[0])
        raise rules.unknown(ids[first], position + first)
    return " ".join(_decimals(rules.vocab_size)[ids].tolist())


@functools.lru_cache(maxsize=1)
def _decimals(vocab_size: int) -> np.ndarray:
    """str [vocab_size]. Looking up a number takes half the time of writing it."""
    return np.array([str(id_) for id_ in range(vocab_size)], dtype=object)


def _content_bounds(ids: np.ndarray, rules: IdRules, position: int) -> tuple[int, int]:
    """[first, stop) of the ids without end-of-document and padding ids at both ends.

    (0, 0) if none is left. Raises BadRecordError for one of these ids inside. `position` is that of
    the first id.
    """
    is_content = ids != rules.end_of_document
    if rules.padding is not None:
        is_content &= ids != rules.padding
    content = np.flatnonzero(is_content)
    if not content.size:
        return 0, 0
    first, last = int(content[0]), int(content[-1])
    if last - first + 1 != content.size:
        gap = int(np.flatnonzero(np.diff(content) > 1)[0])
        raise rules.inner_end(position + int(content[gap]) + 1)
    return first, last + 1


def ids_of_npy(raw: bytes) -> np.ndarray:
    """The ids of an array of one dimension in the .npy format. Raises BadRecordError."""
    stream = io.BytesIO(raw)
    try:
        start, dtype, shape = _read_npy_header(stream)
    except BrokenStreamError as error:
        raise BadRecordError(0, error.reason) from None
    if len(shape) != 1:
        raise BadRecordError(0, f"the array has shape {shape}, a document has one dimension")
    if len(raw) - start != shape[0] * dtype.itemsize:
        raise BadRecordError(0, f"the array of {shape[0]:,} ids has {len(raw) - start:,} bytes")
    return np.frombuffer(raw, dtype, offset=start)


# --- json -----------------------------------------------------------------------------------------


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


# --- arrays ---------------------------------------------------------------------------------------


class IdDocument:
    """Builds the Record of a document of ids, array by array. `offset` is its place, in bytes."""

    def __init__(self, source: Source, offset: int, line: int) -> None:
        self._source, self._rules, self._offset, self._line = source, source.id_rules, offset, line
        self._position = 0  # ids seen
        self._has_content = False
        self._end_at: int | None = None  # position of an end-of-document id after the content
        self._text = DocumentBuilder(source, 0, line)
        self._error: BadRecordError | None = None

    def add(self, ids: np.ndarray) -> None:
        """Append ids, 1-D."""
        try:
            if not self._error:
                self._add_content(ids)
        except BadRecordError as error:
            self._error = error
        self._position += len(ids)

    def _add_content(self, ids: np.ndarray) -> None:
        first, stop = _content_bounds(ids, self._rules, self._position)
        if self._has_content and self._end_at is None and ids.size and (first or not stop):
            self._end_at = self._position
        if not stop:
            return
        if self._end_at is not None:
            raise self._rules.inner_end(self._end_at)
        text = _text_of_array(ids[first:stop], self._rules, self._position + first)
        self._text.add((" " + text if self._has_content else text).encode())
        self._has_content = True
        if stop < len(ids):
            self._end_at = self._position + stop

    def build(self) -> Record | Reject:
        """The document of all ids that were added."""
        if self._error:
            return self._source.reject(self._line, self._offset, self._error.reason)
        return self._text.build()


def read_bin(source: Source) -> Iterator[Record | Reject]:
    """A raw file of ids of type `source.ids.dtype`."""
    return _separated(source, np.dtype(source.id_rules.dtype), 0, None)


def read_npy(source: Source) -> Iterator[Record | Reject]:
    """A file as `numpy.save` writes it."""
    start, dtype, shape = _read_npy_header(source.stream)
    stop = start + int(np.prod(shape, dtype=object)) * dtype.itemsize
    if len(shape) == 1:
        yield from _separated(source, dtype, start, stop)
    elif stop > start:
        row_bytes = shape[1] * dtype.itemsize
        sizes = np.broadcast_to(row_bytes, shape[0])
        yield from read_sized(source, dtype, range(start, stop, row_bytes), sizes, are_rows=True)
    if source.stop >= stop and source.stream.read(1):
        raise BrokenStreamError(source.lines, stop, "there are bytes after the end of the array")


def read_sized(
    source: Source,
    dtype: np.dtype,
    starts: np.ndarray | range,
    sizes: np.ndarray,
    *,
    are_rows: bool = False,
) -> Iterator[Record | Reject]:
    """Consecutive documents at these places, in bytes of the stream, which is at the first one.

    `are_rows`: a document of one repeated id is probably padding and rejected.
    """
    rules = source.id_rules
    first, stop = bisect_left(starts, source.start), bisect_left(starts, source.stop)
    if first:
        source.stream.seek(int(starts[first - 1] + sizes[first - 1]))
    for number in range(first, stop):
        source.lines += 1
        document = IdDocument(source, int(starts[number]), source.lines)
        seen: set[int] = set()  # at least two ids, if there are
        for ids in _chunks_of(source.stream, int(sizes[number]), dtype, source.lines):
            document.add(ids)
            if are_rows and len(seen) < 2:
                seen |= {*np.unique(ids).tolist()}
        may_be_padding = rules.padding is None and rules.end_of_document not in seen
        if len(seen) == 1 and may_be_padding and sizes[number] > dtype.itemsize:
            (padding,) = seen
            yield source.reject(
                source.lines,
                int(starts[number]),
                f"the row has only the id {padding}. If this id fills up the rows: --padding "
                f"{padding}. If they have no padding: --padding {rules.end_of_document}",
            )
        else:
            yield document.build()


def _separated(
    source: Source, dtype: np.dtype, start: int, stop: int | None
) -> Iterator[Record | Reject]:
    """The documents between end-of-document ids in the bytes [start, stop) of the stream.

    The stream is at `start`; a `stop` of None is its end.
    """
    size, end_id, document = dtype.itemsize, source.id_rules.end_of_document, None
    offset, skips = start, source.start > start
    if skips:  # the id before the range is an end-of-document id or not
        offset = start + (-(-(source.start - start) // size) - 1) * size
        source.stream.seek(offset)
    num_bytes = None if stop is None else stop - offset
    for ids in _chunks_of(source.stream, num_bytes, dtype, source.lines):
        begin = 0
        for end in [*np.flatnonzero(ids == end_id).tolist(), len(ids)]:
            if end > begin and not skips:
                if not document:
                    if offset + begin * size >= source.stop:
                        return
                    source.lines += 1
                    document = IdDocument(source, offset + begin * size, source.lines)
                document.add(ids[begin:end])
            if end < len(ids):
                skips = False
                if document:
                    yield document.build()
                document = None
            begin = end + 1
        offset += ids.nbytes
        if not document and offset >= source.stop:
            return
    if document:
        yield document.build()


def _chunks_of(
    stream: BinaryIO, num_bytes: int | None, dtype: np.dtype, line: int
) -> Iterator[np.ndarray]:
    """Arrays of the next `num_bytes` of the stream, or of all bytes to its end if None."""
    left = num_bytes
    while left is None or left > 0:
        raw = stream.read(CHUNK_BYTES if left is None else min(CHUNK_BYTES, left))
        # The stream is buffered: a short read is its end.
        partial = len(raw) % dtype.itemsize
        if len(raw) > partial:
            yield np.frombuffer(raw[: len(raw) - partial], dtype)
        if left is not None:
            left -= len(raw)
            if left and (partial or not raw):
                reason = f"truncated: {left:,} bytes of ids are missing at its end"
                raise BrokenStreamError(line, 0, reason)
        elif partial:
            reason = (
                f"its size is not a multiple of {dtype.itemsize} bytes: truncated, or of "
                f"another --dtype than {dtype.name}"
            )
            raise BrokenStreamError(line, 0, reason)
        elif not raw:
            return


def _read_npy_header(stream: BinaryIO) -> tuple[int, np.dtype, tuple[int, ...]]:
    """(offset of the data, dtype, shape). Raises BrokenStreamError."""
    try:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):  # the others have long headers, for arrays with named columns
            raise ValueError(f"version {version}")
        # A Python literal, which numpy parses without evaluating it.
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        reason = printable(str(error).split("\n")[0])[:160]
        raise BrokenStreamError(
            0,
            0,
            f"not an .npy array: {reason}. If it has only ids, as numpy.memmap and OLMo write "
            "them, rename it to .bin and give --dtype",
        ) from error
    problem = ""
    if dtype.kind not in "iu":
        hint = "; it holds Python objects, which are never loaded" if dtype.hasobject else ""
        problem = f"is of {dtype}, not of integers{hint}"
    elif len(shape) not in (1, 2) or min(shape) < 0:
        problem = f"has shape {shape}; it must have 1 or 2 dimensions"
    elif is_fortran and len(shape) == 2 and min(shape) > 1:
        problem = "is in column order; save numpy.ascontiguousarray of it"
    if problem:
        raise BrokenStreamError(0, 0, f"the array {problem}")
    return stream.tell(), dtype, shape
