"""Records: what a reader gives back for every document, good or unusable, and UTF-8 decoding.

A document's place is an offset, a size and a line; what the three count is said by `Record`.
"""

import codecs
import difflib
import functools
import hashlib
import json
from dataclasses import dataclass, field
from typing import Self

from data_pipeline.errors import printable

MAX_RECORD_BYTES = 256 * 2**20
"""A document that has to be held in memory whole may have this many bytes; longer is a Reject.

Decoded it may take four times that, so a reader stays near 1 GiB whatever it is given.
"""
HELD_BYTES = 16 * 2**20
"""A longer document of a file whose text can be read again in pieces comes without its text."""


@dataclass(frozen=True, slots=True)
class Record:
    """A document and where it stands: `size` bytes at `offset`.

    In compressed files and URLs both count the decompressed stream, in Parquet they are the row
    and the text's size. `line` counts from 1 within the range that was read; 0 is a whole file.
    """

    text: str | None
    """None when longer than HELD_BYTES in a file of raw text: take it with `read_pieces`."""
    offset: int
    size: int
    line: int
    sha256: bytes = field(repr=False)
    """Of the text's UTF-8 bytes, also when the text is not here."""

    @classmethod
    def of(cls, text: str, *, offset: int, size: int, line: int) -> Self:
        """A record whose text is here. ValueError for a text that UTF-8 cannot write."""
        return cls(text, offset, size, line, hashlib.sha256(text.encode("utf-8")).digest())


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that cannot be used. `byte` is the file's byte where it goes wrong."""

    file: str
    line: int
    byte: int
    reason: str
    loses_rest: bool = False
    """Nothing of the file behind it could be read: no one knows how many records that were."""

    def to_json(self) -> str:
        content = {"file": self.file, "line": self.line or None, "byte": self.byte}
        return json.dumps({**content, "reason": self.reason})

    def __str__(self) -> str:
        place = f"{self.line}:byte {self.byte}" if self.line else f"byte {self.byte}"
        return f"{printable(self.file)}:{place}: {self.reason}"


class BadRecordError(ValueError):
    """One record cannot be used. `byte` counts from the record's first byte."""

    def __init__(self, byte: int, reason: str) -> None:
        super().__init__(reason)
        self.byte, self.reason = byte, reason


class BrokenStreamError(ValueError):
    """The file cannot be read on from `byte`, in `line`. Records before it are good."""

    def __init__(self, line: int, byte: int, reason: str) -> None:
        super().__init__(reason)
        self.line, self.byte, self.reason = line, byte, reason


class Utf8Decoder:
    """UTF-8 in pieces cut anywhere; what is wrong is a BadRecordError at its byte."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._given = 0
        self._start = 0  # of what the next call decodes: the decoder holds back half a character

    def decode(self, raw: bytes, *, final: bool = False) -> str:
        try:
            text = self._decoder.decode(raw, final)
        except UnicodeDecodeError as error:
            raise _not_utf8(error, self._start) from None
        self._given += len(raw)
        self._start = self._given - len(self._decoder.getstate()[0])
        return text


def decode(raw: bytes) -> str:
    """`raw` as text, or BadRecordError at the byte that is no UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(error, 0) from None


def _not_utf8(error: UnicodeDecodeError, start: int) -> BadRecordError:
    byte, hint = start + error.start, ""
    if not byte and error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        hint = "; it looks like UTF-16: convert it with iconv -f UTF-16 -t UTF-8"
    found = error.object[error.start]
    return BadRecordError(byte, f"invalid UTF-8: byte 0x{found:02x}, {error.reason}{hint}")


@functools.lru_cache(maxsize=256)  # a wrong key is wrong in every record
def did_you_mean(name: str, known: tuple[str, ...]) -> str:
    """`; did you mean "text"?` where one of `known` is near to `name`, else nothing."""
    by_lower = {each.casefold(): each for each in known}
    nearest = difflib.get_close_matches(name.casefold(), by_lower, n=1)
    return f'; did you mean "{printable(by_lower[nearest[0]])[:40]}"?' if nearest else ""
