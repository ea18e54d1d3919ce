"""text: a file is one document, with its path as id. The text is not changed.

binary: a file that is not text, which is rejected. A file is binary if its first bytes contain NUL,
or if more than a tenth of them are control characters other than those of texts: tab, line breaks,
vertical tab, form feed, backspace and escape. NUL later in a file rejects its document, too. With
`--format text` all bytes are text.
"""

from collections.abc import Iterator

from data_pipeline.readers.records import Record, Reject
from data_pipeline.readers.source import NUL_REASON, DocumentBuilder, Source, read_chunks

HEAD_BYTES = 2**16
"""Bytes at the beginning of a file that decide whether it is text."""
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x1b"))


def read_text(source: Source) -> Iterator[Record | Reject]:
    document = None
    for chunk in read_chunks(source):
        document = document or DocumentBuilder(source, chunk.offset, line=0)
        document.add(chunk.raw)
    yield (document or DocumentBuilder(source, 0, line=0)).build()


def read_binary(source: Source) -> Iterator[Record | Reject]:
    head = source.stream.read(HEAD_BYTES)
    reason = NUL_REASON if b"\0" in head else "binary: it has many control characters"
    yield source.reject(0, max(head.find(b"\0"), 0), reason)


def is_binary(head: bytes) -> bool:
    """Whether the first HEAD_BYTES of a file are not those of a text."""
    return b"\0" in head or 10 * len(head.translate(None, _CONTROLS)) < 9 * len(head)
