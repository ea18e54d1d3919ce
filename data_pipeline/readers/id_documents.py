"""Documents of ids in arrays: the text of an array, and documents built from several arrays."""

import functools
import hashlib

import numpy as np

from data_pipeline.readers.records import (
    HELD_BYTES,
    MAX_RECORD_BYTES,
    BadRecordError,
    Record,
    Reject,
)
from data_pipeline.readers.source import Source, too_long_error
from data_pipeline.readers.token_ids import IdRules, inner_end, outside


def text_of_array(ids: np.ndarray, rules: IdRules, *, position: int = 0) -> str:
    """The text of a 1-D array of integers.

    Raises BadRecordError for an id outside the vocabulary. `position` is that of the first id in
    its document.
    """
    _require_known(ids, rules, position)
    return " ".join(_decimals(rules.vocab_size)[ids].tolist())


@functools.lru_cache(maxsize=1)
def _decimals(vocab_size: int) -> np.ndarray:
    """str [vocab_size]. Looking up a number takes half the time of writing it."""
    return np.array([str(id_) for id_ in range(vocab_size)], dtype=object)


def _require_known(ids: np.ndarray, rules: IdRules, position: int) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= rules.vocab_size):
        first = int(np.flatnonzero((ids < 0) | (ids >= rules.vocab_size))[0])
        raise outside(ids[first], position + first, rules)


def text_of_document(ids: np.ndarray, rules: IdRules) -> str:
    """As `text_of_array`, for a whole document: drops `rules.outer` at both ends.

    Raises BadRecordError also for one of these ids inside the document.
    """
    _require_known(ids, rules, 0)
    first, stop = content_bounds(ids, rules)
    return text_of_array(ids[first:stop], rules, position=first)


def content_bounds(ids: np.ndarray, rules: IdRules, *, position: int = 0) -> tuple[int, int]:
    """[first, stop) of the ids without `rules.outer` at both ends; (0, 0) if none is left.

    Raises BadRecordError for one of these ids inside. `position` is that of the first id.
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
        raise inner_end(position + int(content[gap]) + 1, rules)
    return first, last + 1


class IdDocument:
    """Builds the Record of a document of ids that is a byte range of the file, array by array.

    In a rereadable file, a text above HELD_BYTES is not held: the record has its hash only.
    """

    def __init__(self, source: Source, rules: IdRules, offset: int, line: int) -> None:
        self._source, self._rules, self._line = source, rules, line
        self._offset, self._size = offset, 0  # in bytes of the file, without outer end ids
        self._position = 0  # ids seen
        self._end_at: int | None = None  # position of an end-of-document id after the content
        self._parts: list[str] = []
        self._text_bytes = 0
        self._sha256 = hashlib.sha256()
        self._is_held = True
        self._error: BadRecordError | None = None

    def add(self, ids: np.ndarray) -> None:
        """Append ids, 1-D."""
        if not self._error:
            try:
                self._add_content(ids)
            except BadRecordError as error:
                self._error, self._parts = error, []
        self._position += len(ids)

    def _add_content(self, ids: np.ndarray) -> None:
        first, stop = content_bounds(ids, self._rules, position=self._position)
        if self._size and self._end_at is None and ids.size and (first or not stop):
            self._end_at = self._position
        if not stop:
            return
        if self._end_at is not None:
            raise inner_end(self._end_at, self._rules)
        body = ids[first:stop]
        text = text_of_array(body, self._rules, position=self._position + first)
        self._add_text(" " + text if self._size else text)
        if not self._size:
            self._offset += (self._position + first) * ids.itemsize
        self._size += body.nbytes
        if stop < len(ids):
            self._end_at = self._position + stop

    def _add_text(self, text: str) -> None:
        self._sha256.update(text.encode())
        self._text_bytes += len(text)
        if self._is_held:
            self._parts.append(text)
        if self._source.rereadable and self._text_bytes > HELD_BYTES:
            self._is_held, self._parts = False, []
        elif self._text_bytes > MAX_RECORD_BYTES and not self._source.rereadable:
            raise too_long_error()

    def build(self) -> Record | Reject:
        """The document of all ids that were added."""
        if self._error:
            return self._source.reject(self._line, self._offset, self._error.reason)
        text = "".join(self._parts) if self._is_held else None
        return Record(
            text, self._offset, self._size, self._line, self._sha256.digest(), self._text_bytes
        )
