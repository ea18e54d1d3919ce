"""Record and Reject, which a reader yields for a good and a bad document; ids and UTF-8 text."""

import codecs
import json
from dataclasses import dataclass, field
from typing import Any

from data_pipeline.errors import printable

MAX_RECORD_BYTES = 256 * 2**20
"""Size limit of a document that must be held in RAM; a longer one is a Reject.

A decoded str takes up to 4 bytes per character, so a reader needs at most about 1 GiB.
"""


@dataclass(slots=True)  # frozen would take four times the time, for every document
class Record:
    """A document whose text was written to `Source.texts`: `size` bytes of UTF-8 at `offset`.

    `line` is counted from 1 within the range; 0 means that the document is the whole file.
    """

    offset: int
    size: int
    line: int
    sha256: bytes = field(repr=False)
    """Of the UTF-8 bytes of the text."""
    key: str = ""
    """The name of the document in its file, for the id FILE:key; "" for the id FILE:line."""


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

    def __init__(self, reason: str, *, byte: int = 0) -> None:
        super().__init__(reason)
        self.reason, self.byte = reason, byte


class BrokenStreamError(ValueError):
    """The file cannot be read from `byte` on. Earlier records remain valid.

    `line` is 0 for the last one that the reader counted in `Source.lines`.
    """

    def __init__(self, reason: str, *, line: int = 0, byte: int = 0) -> None:
        super().__init__(reason)
        self.reason, self.line, self.byte = reason, line, byte


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
            f"token id {str(id_)[:40]} at position {position:,} is not in the vocabulary of "
            f"{self.vocab_size} ids, 0 to {self.vocab_size - 1}"
        )

    def inner_end(self, position: int) -> BadRecordError:
        """The error for an end-of-document or padding id inside a document."""
        name = f"end-of-document id {self.end_of_document}"
        if self.padding is not None:
            name = f"{name} or padding id {self.padding}"
        return BadRecordError(
            f"the {name} at position {position:,} is inside the document; split the document there"
        )


def decode(raw: bytes) -> str:
    """Decode the UTF-8 of a record. Raises BadRecordError with the offset of the first bad byte."""
    if len(raw) > MAX_RECORD_BYTES:
        raise too_long()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(error, error.start) from None


def not_utf8(error: UnicodeDecodeError, byte: int) -> BadRecordError:
    """The error for a byte of a record that is not UTF-8."""
    hint = ""
    if not byte and error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        hint = "; it looks like UTF-16: convert it with iconv -f UTF-16 -t UTF-8"
    value = error.object[error.start]
    return BadRecordError(f"invalid UTF-8: byte 0x{value:02x}, {error.reason}{hint}", byte=byte)


def too_long() -> BadRecordError:
    """The error for a record above MAX_RECORD_BYTES."""
    return BadRecordError(
        f"longer than {MAX_RECORD_BYTES:,} bytes, the limit for a document that is held in RAM; "
        "text files and arrays of ids may be of any size"
    )


def value_at(key: str, content: object) -> Any:
    """The value at a key of parsed JSON. Raises BadRecordError, which names the keys seen."""
    if not isinstance(content, dict):
        raise BadRecordError(f"not a JSON object but a {type(content).__name__}")
    if key not in content:
        seen = ", ".join(printable(each)[:40] for each in list(content)[:10]) or "none"
        raise BadRecordError(f'no key "{key}"; keys seen: {seen} (see --text-key)')
    return content[key]
