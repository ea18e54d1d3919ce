"""Cutting a stream into lines, and documents that stand in a file as they are.

All in bounded memory: a line comes in pieces when it is long, and a document longer than
`HELD_BYTES` is checked and hashed as it passes instead of being held.
"""

import codecs
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from data_pipeline.readers.records import (
    HELD_BYTES,
    MAX_RECORD_BYTES,
    BadRecordError,
    BrokenStreamError,
    Record,
    Reject,
    Utf8Decoder,
    decode,
)
from data_pipeline.storage.source_errors import explain

PIECE_BYTES = 2**20


@dataclass(slots=True)
class Source:
    """What a reader is given: an open file, and the bytes [start, stop) whose records it wants."""

    name: str
    """For rejects."""
    stream: BinaryIO
    """At its beginning, decompressed, buffered."""
    start: int
    stop: float
    """Infinity for the rest of the file, also when that has grown."""
    text_key: str
    rereadable: bool
    lines: int = 0
    """Lines whose first byte is in the range, so far: a reader of lines keeps it."""

    def reject(self, line: int, byte: int, reason: str) -> Reject:
        return Reject(self.name, line, byte, reason)


class EvaluationChunk(NamedTuple):
    """A line, or at most PIECE_BYTES + 1 of one. Never cut between CR and LF."""

    offset: int
    line: int
    """From 1 within the range."""
    raw: bytes
    begins: bool
    """Whether a line begins here."""
    inside: bool
    """Whether it does so in the range, a byte-order mark counted as part of the first line."""


def pieces(source: Source) -> Iterator[EvaluationChunk]:
    """The stream from `source.start` on, in PIECE_BYTES. Without a byte-order mark at the front."""
    offset = 0
    while raw := _read(source, offset, PIECE_BYTES):
        body = _without_mark(raw) if not offset else raw
        if body:
            yield EvaluationChunk(offset + len(raw) - len(body), 0, body, not offset, True)
        offset += len(raw)


def line_pieces(source: Source, *, past_stop: bool = False) -> Iterator[EvaluationChunk]:
    """The lines that begin in the range, and with `past_stop` all behind them.

    Nothing if no line begins in the range.
    """
    offset, begins, line = _first_line(source), True, 0
    if offset >= source.stop:
        return
    while past_stop or not begins or offset < source.stop:
        raw = _read_line(source, offset, line + begins)
        if not raw:
            return
        line += begins
        inside = offset < source.stop
        if inside:
            source.lines = line
        body = raw if offset else _without_mark(raw)
        yield EvaluationChunk(offset + len(raw) - len(body), line, body, begins, inside)
        begins = raw.endswith(b"\n")
        offset += len(raw)


def _first_line(source: Source) -> int:
    """Move to the first line that begins at `source.start` or later; its offset.

    Or any offset from `source.stop` on if none begins in the range: a line that is longer than many
    ranges is not read to its end in each of them.
    """
    if not source.start:
        return 0
    offset = source.start - 1
    source.stream.seek(offset)
    while offset < source.stop and (raw := source.stream.readline(PIECE_BYTES)):
        offset += len(raw)
        if raw.endswith(b"\n"):
            break
    return offset


def _read(source: Source, offset: int, size: int) -> bytes:
    try:
        return source.stream.read(size)
    except OSError as error:
        raise BrokenStreamError(0, offset, explain(error)) from error


def _read_line(source: Source, offset: int, line: int) -> bytes:
    try:
        raw = source.stream.readline(PIECE_BYTES)
        if raw.endswith(b"\r") and source.stream.peek(1)[:1] == b"\n":  # type: ignore[attr-defined]
            raw += source.stream.read(1)
        return raw
    except OSError as error:
        raise BrokenStreamError(line, offset, explain(error)) from error


def _without_mark(raw: bytes) -> bytes:
    return raw.removeprefix(codecs.BOM_UTF8)


class Span:
    """A document that is UTF-8 in its file as it is, collected piece by piece."""

    def __init__(self, source: Source, offset: int, line: int) -> None:
        self._source, self._offset, self._line = source, offset, line
        self._size = 0
        self._held: list[bytes] = []
        self._sha256 = hashlib.sha256()
        self._decoder: Utf8Decoder | None = None  # once it is too long to be held
        self._error: BadRecordError | None = None

    def add(self, raw: bytes) -> None:
        self._size += len(raw)
        if self._error:
            return
        if self._decoder:
            self._check(raw)
            return
        self._held.append(raw)
        if self._source.rereadable:
            if self._size > HELD_BYTES:
                self._decoder = Utf8Decoder()
                self._check(b"".join(self._held))
                self._held = []
        elif self._size > MAX_RECORD_BYTES:
            self._error, self._held = too_long(), []

    def _check(self, raw: bytes, *, final: bool = False) -> None:
        self._sha256.update(raw)
        try:
            assert self._decoder
            self._decoder.decode(raw, final=final)
        except BadRecordError as error:
            self._error = error

    def end(self) -> Record | Reject:
        """The document, of everything added."""
        text = None
        try:
            if self._decoder and not self._error:
                self._check(b"", final=True)
            if self._error:
                raise self._error
            if not self._decoder:
                raw = b"".join(self._held)
                text = decode(raw)
                self._sha256.update(raw)
        except BadRecordError as error:
            return self._source.reject(self._line, self._offset + error.byte, error.reason)
        return Record(text, self._offset, self._size, self._line, self._sha256.digest())


def too_long() -> BadRecordError:
    return BadRecordError(
        0,
        f"longer than {MAX_RECORD_BYTES:,} bytes, the most that is held in memory of one document; "
        "plain text files may be of any size",
    )
