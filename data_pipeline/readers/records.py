"""Record and Reject, which a reader yields for a good and a bad document; ids and UTF-8 text."""

import codecs
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Self

from data_pipeline.errors import printable

MAX_RECORD_BYTES = 256 * 2**20
"""Size limit of a document that must be held in RAM; a longer one is a Reject.

A decoded str takes up to 4 bytes per character, so a reader needs at most about 1 GiB.
"""
HELD_BYTES = 16 * 2**20
"""A longer document is yielded without its text, if that can be read again from a file."""


@dataclass(slots=True)  # frozen would take four times the time, for every document
class Record:
    """A document and its place: `size` bytes at `offset`, in line `line`.

    `offset` and `size` count bytes of the stream, if the text can be read again from there. `line`
    is counted from 1 within the range; 0 means that the document is the whole file.
    """

    text: str | None
    """None if longer than HELD_BYTES and it can be read again; use `read_text_chunks`."""
    offset: int
    size: int
    line: int
    sha256: bytes = field(repr=False)
    """Of the UTF-8 bytes of the text, also when `text` is None."""
    key: str = ""
    """The name of the document in its file, for the id FILE:key; "" for the id FILE:line."""

    @classmethod
    def of(cls, text: str, *, line: int, offset: int = 0, size: int = 0, key: str = "") -> Self:
        """A record with its text. Raises ValueError for a text that UTF-8 cannot encode.

        Files whose texts are spilled need no place.
        """
        sha256 = hashlib.sha256(text.encode("utf-8")).digest()
        return cls(text, offset, size, line, sha256, key=key)


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that cannot be used. `byte` is the offset of the problem in the file."""

    file: str
    line: int
    byte: int
    reason: str
    loses_rest: bool = False
    """The rest of the file could not be read either; the number of lost records is unknown."""

    def to_json(self) -> str:
        content = {"file": self.file, "line": self.line or None, "byte": self.byte}
        return json.dumps({**content, "reason": self.reason})

    def __str__(self) -> str:
        place = f"{self.line}:byte {self.byte}" if self.line else f"byte {self.byte}"
        return f"{printable(self.file)}:{place}: {self.reason}"


class BadRecordError(ValueError):
    """One record cannot be used. `byte` is counted from the first byte of the record."""

    def __init__(self, byte: int, reason: str) -> None:
        super().__init__(reason)
        self.byte, self.reason = byte, reason


class BrokenStreamError(ValueError):
    """The file cannot be read from `byte`, in `line`, on. Earlier records remain valid."""

    def __init__(self, line: int, byte: int, reason: str) -> None:
        super().__init__(reason)
        self.line, self.byte, self.reason = line, byte, reason


@dataclass(frozen=True, slots=True)
class IdRules:
    """The ids that an input of token ids may contain, and how raw arrays store them."""

    vocab_size: int
    end_of_document: int
    dtype: str = ""
    """NumPy name of the integers of a raw file, such as "<u2"; "" if it is not given."""
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


class Utf8Decoder:
    """Incremental UTF-8 decoder. Raises BadRecordError with the offset of the wrong byte."""

    def __init__(self) -> None:
        self._rest = b""  # of a character that is incomplete
        self._start = 0  # the offset of `_rest`

    def decode(self, raw: bytes, *, final: bool = False) -> str:
        raw = self._rest + raw
        try:
            text, size = codecs.utf_8_decode(raw, "strict", final)
        except UnicodeDecodeError as error:
            raise _not_utf8(error, self._start) from None
        self._rest, self._start = raw[size:], self._start + size
        return text


def decode(raw: bytes) -> str:
    """Decode UTF-8. Raises BadRecordError with the offset of the first wrong byte."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(error, 0) from None


def _not_utf8(error: UnicodeDecodeError, start: int) -> BadRecordError:
    byte, hint = start + error.start, ""
    if not byte and error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        hint = "; it looks like UTF-16: convert it with iconv -f UTF-16 -t UTF-8"
    value = error.object[error.start]
    return BadRecordError(byte, f"invalid UTF-8: byte 0x{value:02x}, {error.reason}{hint}")


def value_at(key: str, content: object) -> Any:
    """The value at a key of parsed JSON. Raises BadRecordError, which names the keys seen."""
    if not isinstance(content, dict):
        raise BadRecordError(0, f"not a JSON object but a {type(content).__name__}")
    if key not in content:
        seen = ", ".join(printable(each)[:40] for each in list(content)[:10]) or "none"
        raise BadRecordError(0, f'no key "{key}"; keys seen: {seen} (see --text-key)')
    return content[key]
