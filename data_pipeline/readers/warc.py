"""warc: the plain texts of web pages, the WET files of Common Crawl. A page is a document.

The id is FILE:URI of the page; FILE:RECORD-ID for a page without URI and a URI that occurs again.
WARC files of whole responses and WAT files of metadata are refused, because they hold no texts.

Source: ISO 28500, "WARC file format". A WET file has a record of type warcinfo and then records of
type conversion.
"""

import hashlib
from collections.abc import Iterator

from data_pipeline.errors import printable
from data_pipeline.readers.records import (
    MAX_RECORD_BYTES,
    BadRecordError,
    BrokenStreamError,
    Record,
    Reject,
    decode,
)
from data_pipeline.readers.source import CHUNK_BYTES, Source, read_exactly, too_long_error

_MAX_HEADER_BYTES = 2**16


def read_warc(source: Source) -> Iterator[Record | Reject]:
    keys: set[bytes] = set()
    while headers := _read_headers(source):
        kind, size = headers.get("warc-type", ""), headers.get("content-length", "")
        if not (size.isascii() and size.isdecimal()):
            raise _broken(source, f"a record has the Content-Length {size[:20]!r}")
        if kind not in ("warcinfo", "conversion"):
            raise _broken(
                source,
                f"it has a record of type {kind[:20]!r}, which is no plain text. Give the WET "
                "files (.warc.wet.gz) of the same crawl",
            )
        is_too_long = int(size) > MAX_RECORD_BYTES
        raw = _read_block(source, int(size), is_wanted=kind == "conversion" and not is_too_long)
        if kind == "warcinfo":
            continue
        source.lines += 1
        try:
            if is_too_long:
                raise too_long_error()
            text = decode(raw)
        except BadRecordError as error:
            yield source.reject(source.lines, error.byte, error.reason)
            continue
        key = _key(headers, keys)
        yield Record.of(text, offset=0, size=int(size), line=source.lines, key=key)


def _key(headers: dict[str, str], keys: set[bytes]) -> str:
    """The page's URI, or the record's id if the file had this URI before. Adds it to `keys`."""
    for name in ("warc-target-uri", "warc-record-id"):
        key = headers.get(name, "").strip("<>")
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        if key and digest not in keys:
            keys.add(digest)
            return key
    return ""  # the id is then FILE:NUMBER


def _read_headers(source: Source) -> dict[str, str]:
    """The headers of the next record by name in lower case; {} at the end of the file."""
    line = b"\n"
    while line and not line.strip():  # the blank lines after the record before
        line = source.stream.readline(_MAX_HEADER_BYTES)
    if not line:
        return {}
    if not line.startswith(b"WARC/"):
        raise _broken(source, f"no WARC record begins with {printable(repr(line[:20]))}")
    headers, size = {"": ""}, 0
    while (line := source.stream.readline(_MAX_HEADER_BYTES)).strip():
        size += len(line)
        if size > _MAX_HEADER_BYTES:
            raise _broken(source, f"the headers of a record exceed {_MAX_HEADER_BYTES:,} bytes")
        name, _, value = line.decode("utf-8", errors="backslashreplace").partition(":")
        headers[name.strip().lower()] = value.strip()
    return headers


def _read_block(source: Source, size: int, *, is_wanted: bool) -> bytes:
    """The next `size` bytes; b"" if they are not wanted."""
    raw, missing = b"", size
    if is_wanted:
        raw = read_exactly(source.stream, size)
        missing -= len(raw)
    while missing and (skipped := source.stream.read(min(missing, CHUNK_BYTES))):
        missing -= len(skipped)
    if missing:
        raise _broken(source, f"truncated: {missing:,} bytes of a record are missing at its end")
    return raw


def _broken(source: Source, reason: str) -> BrokenStreamError:
    return BrokenStreamError(source.lines, 0, reason)
