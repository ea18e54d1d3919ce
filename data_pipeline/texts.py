"""Texts in bounded memory: what a scan needs to know of every record, and a document read again.

A plain text file is one document however large it is, so it is never held whole: it is checked and
hashed in pieces, and comes back in pieces. Records of other files are as large as `documents.py`
makes them. What that module cannot find again by offset (compressed files) is spilled as UTF-8
to a file of ours on the first reading, and then read from there.
"""

import codecs
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from data_pipeline.documents import (
    InputFile,
    Reject,
    read_again,
    read_records,
    utf8_problem,
)

CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Scanned:
    """A record's place (bytes of its file, or of the spill file) and what its text is."""

    offset: int
    size: int
    line: int
    """Counted within the range that was read; 0 for whole files."""
    text_bytes: int
    text_sha256: bytes


def scan_range(
    file: InputFile, text_key: str, start: int, stop: int, spill: BinaryIO | None
) -> Iterator[Scanned | Reject]:
    """Every record of a range; the texts of a file that is not rereadable also go to `spill`."""
    if file.kind == "text" and file.rereadable and Path(file.path).is_file():
        yield _scan_text(file)
        return
    for record in read_records(file, text_key, start, stop):
        if isinstance(record, Reject):
            yield record
            continue
        offset, size = record.offset, record.size
        target = spill if not file.rereadable else None
        if target is not None:
            offset = target.tell()
        digest, text_bytes = hashlib.sha256(), 0
        for piece in _cut(record.text):
            raw = piece.encode("utf-8")
            digest.update(raw)
            text_bytes += len(raw)
            if target is not None:
                target.write(raw)
        size = text_bytes if target is not None else size
        yield Scanned(offset, size, record.line, text_bytes, digest.digest())


def count_lines(file: InputFile, start: int, stop: int) -> int:
    """Lines of a file that begin in [start, stop), blank ones too."""
    lines = int(start == 0 < stop)
    with Path(file.path).open("rb") as stream:
        # A line begins behind the line feed of the one before it.
        stream.seek(max(start - 1, 0))
        left = stop - 1 - max(start - 1, 0)
        while left > 0 and (raw := stream.read(min(left, CHUNK_BYTES))):
            lines += raw.count(b"\n")
            left -= len(raw)
    return lines


def read_pieces(
    file: InputFile, text_key: str, place: tuple[int, int, int], spill: Path | None
) -> Iterator[str]:
    """The text of the document at `place` (offset, size, line) again, in pieces.

    `spill` is the file that holds it if it was spilled. Raises OSError or ValueError when no text
    is there now.
    """
    offset, size, line = place
    if spill is not None:
        yield from _decoded(spill, offset, size)
    elif file.kind == "text":
        yield from _decoded(Path(file.path), offset, size)
    else:
        yield from _cut(read_again(file, text_key, (offset, size, line)))


def _cut(text: str) -> Iterator[str]:
    """Pieces of a text, so that no more than the text itself is ever as large as it."""
    for first in range(0, len(text), CHUNK_BYTES):
        yield text[first : first + CHUNK_BYTES]


def _scan_text(file: InputFile) -> Scanned | Reject:
    digest = hashlib.sha256()
    try:
        with Path(file.path).open("rb") as stream:
            beginning = stream.read(len(codecs.BOM_UTF8))
        offset = len(codecs.BOM_UTF8) if beginning == codecs.BOM_UTF8 else 0
        size = 0
        for text in _decoded(Path(file.path), offset, None):
            raw = text.encode("utf-8")
            digest.update(raw)
            size += len(raw)
        return Scanned(offset, size, 0, size, digest.digest())
    except _BadTextError as error:
        reason = utf8_problem(error.cause, beginning)
        return Reject(file.name, 0, error.byte, reason)
    except OSError as error:
        return Reject(file.name, 0, 0, f"cannot be read: {error.strerror}")


class _BadTextError(ValueError):
    def __init__(self, byte: int, cause: UnicodeDecodeError) -> None:
        super().__init__(str(cause))
        self.byte, self.cause = byte, cause


def _decoded(path: Path, offset: int, size: int | None) -> Iterator[str]:
    """`size` bytes of a file from `offset` (None: to its end) as text in pieces."""
    with path.open("rb") as stream:
        stream.seek(offset)
        rest, left, last = b"", size, False
        while not last:
            raw = stream.read(CHUNK_BYTES if left is None else min(left, CHUNK_BYTES))
            left = None if left is None else left - len(raw)
            last = not raw or left == 0
            held = rest + raw
            try:
                text, used = codecs.utf_8_decode(held, "strict", last)
            except UnicodeDecodeError as error:
                raise _BadTextError(offset + error.start, error) from None
            rest, offset = held[used:], offset + used
            if text:
                yield text
