"""tar: a WebDataset. Members with the same key are a sample, and every sample is a document.

The key is the path up to the first dot of the file name; the rest is the extension. The id of the
document is `FILE:KEY`. Its text is that of the first of these members that the sample has:

1. the extension `--text-key`, such as `caption.txt`
2. only with the default key: `.txt`, or `.npy` with `--format ids`
3. `.json`: an object with the text at `--text-key`

Other members (images, labels) are skipped, and samples named `__NAME__` that have no text, such as
`__meta__.json`. Nothing is written to disk or loaded by name.

`tarfile` of the standard library is not strict enough for input that may be damaged or hostile: it
takes a damaged header after the first member for the end of the archive, ignores archives that
follow the first, accepts a missing end, and reads extended headers of any size into RAM. Through
the stream that it gets here (`_Blocks`), each of these is an error.

Sources: webdataset, `tariterators.group_by_keys` and `base_plus_ext`; POSIX.1-2017, pax, "ustar
Interchange Format" and "pax Header Block"; GNU tar manual, "Basic Tar Format".
"""

import hashlib
import os
import posixpath
import re
import tarfile
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import PurePosixPath
from typing import BinaryIO, NamedTuple

from data_pipeline.errors import printable
from data_pipeline.readers.ids import text_of_npy
from data_pipeline.readers.source import (
    CHUNK_BYTES,
    MAX_RECORD_BYTES,
    BadRecordError,
    BrokenStreamError,
    Record,
    Reject,
    Source,
    read_exactly,
    too_long,
)
from data_pipeline.readers.text import text_of_line
from data_pipeline.system.sources import SourceError, require_plausible_ratio

_METADATA = re.compile(r"__[^/]*__(/|\Z)")  # webdataset skips these members, too
_FILES = {tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE}
_LINKS_AND_DEVICES = {
    *(tarfile.SYMTYPE, tarfile.LNKTYPE),
    *(tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE),
}


class Member(NamedTuple):
    """An entry of the archive, a file unless `is_folder`."""

    name: str
    """Always valid UTF-8; without "./" in front."""
    offset: int
    """Of its header, in the decompressed archive."""
    size: int
    problem: str
    """Why its content cannot be used, such as "a link or a device"; "" for a regular file."""
    is_folder: bool
    chunks: Callable[[], Iterator[bytes]]
    """The content, until the next member is taken."""


def members_of_tar(stream: BinaryIO, stored_bytes: int) -> Iterator[Member]:
    """The members of an archive, in order.

    `stored_bytes` is the size of the archive in its file, 0 if it is unknown. Raises
    BrokenStreamError for an archive that cannot be read any further.
    """
    blocks = _Blocks(stream, stored_bytes)
    try:
        tar = tarfile.TarFile(fileobj=blocks, encoding="utf-8", errors="surrogateescape")  # type: ignore[arg-type]
        while header := tar.next():
            tar.members.clear()  # type: ignore[attr-defined] # or they would fill the RAM
            if tar.pax_headers.keys() & {"path", "size"}:
                raise blocks.broken("a global header sets the path or size of all members")
            yield _member(header, blocks)
    except BrokenStreamError:
        raise
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        is_first = blocks.tell() <= tarfile.BLOCKSIZE
        kind = "not a tar archive" if is_first else "damaged header"
        raise blocks.broken(f"{kind} ({error})") from None
    blocks.require_end()


def _member(header: tarfile.TarInfo, blocks: "_Blocks") -> Member:
    name = os.fsencode(header.name).decode("utf-8", errors="backslashreplace")
    shown = printable(name)[:200]
    if "\0" in name:
        raise blocks.broken("damaged extended header")
    if header.issparse() or any(key.startswith("GNU.sparse") for key in header.pax_headers):
        raise blocks.broken(f"member {shown} is sparse; archive it without --sparse")
    is_link = header.type in _LINKS_AND_DEVICES
    is_known = header.type in _FILES or header.isdir() or is_link
    if not is_known or header.size < 0 or (header.size and header.type not in _FILES):
        raise blocks.broken(
            f"member {shown} of type {header.type!r} and size {header.size:,}: unsupported or "
            "damaged"
        )
    blocks.require_plausible(header.offset_data + header.size)
    problem = "a link or a device, not a file" if is_link else path_problem(name)
    return Member(
        name.removeprefix("./"),
        header.offset_data - tarfile.BLOCKSIZE,
        header.size,
        problem,
        header.isdir(),
        lambda: blocks.chunks(header.size),
    )


class _Blocks:
    """The stream as tarfile reads it: each read gives all bytes, or the archive is truncated."""

    def __init__(self, stream: BinaryIO, stored_bytes: int) -> None:
        self._stream, self._stored_bytes = stream, stored_bytes
        self._position, self._last = 0, b""

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        """Skip what is left of a member."""
        num_bytes = position - self._position
        if num_bytes < 0:
            raise self.broken("damaged header: a size below 0")
        if num_bytes > CHUNK_BYTES and self._stream.seekable():
            self._position = self._stream.seek(position)
        else:
            for _ in self.chunks(num_bytes):
                pass

    def chunks(self, num_bytes: int) -> Iterator[bytes]:
        for left in range(num_bytes, 0, -CHUNK_BYTES):
            yield self.read(min(left, CHUNK_BYTES))
            self._last = b""  # no header

    def read(self, size: int) -> bytes:
        if not 0 <= size <= CHUNK_BYTES:  # hundreds of bytes hold a path and times
            raise self.broken(f"an extended header declares {size:,} bytes")
        types = (tarfile.XHDTYPE, tarfile.XGLTYPE)
        is_pax = self._last[257:262] == b"ustar" and self._last[156:157] in types
        self._last = read_exactly(self._stream, size)
        self._position += len(self._last)
        if not self._position:
            raise self.broken("empty")
        if len(self._last) < size:
            raise self.broken("truncated: it ends without an end mark")
        if is_pax:
            self._require_pax_records(self._last)
        return self._last

    def _require_pax_records(self, raw: bytes) -> None:
        """Raise BrokenStreamError for other records than "LENGTH KEY=VALUE\\n".

        tarfile before Python 3.12 ignores these, and takes the shorter name of the next header.
        """
        raw = raw.partition(b"\0")[0]  # without the padding
        while raw:
            length = raw.partition(b" ")[0]
            record = raw[: int(length)] if length.isdigit() else b""
            if b"=" not in record or not record.endswith(b"\n"):
                raise self.broken("damaged extended header")
            raw = raw[len(record) :]

    def require_end(self) -> None:
        """Raise BrokenStreamError unless the end is marked and only zeros follow.

        tarfile also ends at a damaged header.
        """
        if any(self._last):
            raise self.broken("damaged header")
        while raw := self._stream.read(CHUNK_BYTES):
            self._position += len(raw)
            self.require_plausible(self._position)
            if raw.strip(b"\0"):
                raise self.broken("there is data after its end, such as another archive")

    def require_plausible(self, num_bytes: int) -> None:
        """Raise BrokenStreamError if `num_bytes` is implausible for the size of the archive."""
        try:
            if self._stored_bytes:
                require_plausible_ratio(num_bytes, self._stored_bytes)
        except SourceError as error:
            raise self.broken(str(error.strerror)) from error

    def broken(self, reason: str) -> BrokenStreamError:
        return BrokenStreamError(reason, byte=self._position)


def path_problem(name: str) -> str:
    """Why the path of a member cannot be used; "" for a relative path inside the archive."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        return "a path that leaves the archive"
    return "a path that is not a name" if "\0" in name or not path.name else ""


@dataclass(slots=True)
class _Sample:
    """The members of one key that were read so far."""

    key: str
    problem: str
    offset: int = 0
    contents: dict[str, bytes] = field(default_factory=dict)
    """By extension: the members that may be the text; empty bytes for the others."""

    def add(self, member: Member, text_extensions: list[str]) -> None:
        extension = split_name(member.name)[1]
        is_text = extension in text_extensions
        problem = f"is {member.problem}" if member.problem else ""
        if extension in self.contents:
            problem = problem or "occurs twice"
        if is_text and member.size > MAX_RECORD_BYTES:
            problem = problem or f"is {too_long().reason}"
        if problem:
            self.problem = self.problem or f"member {printable(member.name)[:200]} {problem}"
        if not self.contents:
            self.offset = member.offset
        self.contents[extension] = b"".join(member.chunks()) if is_text and not problem else b""


def read_tar(source: Source) -> Iterator[Record | Reject]:
    seen = set[bytes]()  # digests, because keys may be long
    text_extensions = sample_extensions(source.text_key, is_ids=source.file.ids is not None)
    members = filter(_belongs_to_sample, members_of_tar(source.stream, source.file.size))
    for key, group in groupby(members, lambda member: split_name(member.name)[0]):
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        repeated = "the key occurs twice; members of a sample must follow each other"
        sample = _Sample(key, repeated if digest in seen else "")
        seen.add(digest)
        for member in group:
            sample.add(member, text_extensions)
        text_of, line = partial(_text_of, source, text_extensions), source.lines + 1
        record = source.record(text_of, sample, line=line, byte=sample.offset, key=key)
        if isinstance(record, Record):
            text = next(each for each in text_extensions if each in sample.contents)
            source.unread.update(each[:40] for each in sample.contents if each != text)
        if not (isinstance(record, Reject) and is_metadata(f"{posixpath.basename(key)}/")):
            source.lines += 1
            yield record


def _belongs_to_sample(member: Member) -> bool:
    is_hidden = not posixpath.basename(split_name(member.name)[0])
    return not (member.is_folder or is_hidden or is_metadata(member.name))


def is_metadata(name: str) -> bool:
    """Whether a member describes the dataset: its path is `__NAME__`, or is in such a folder."""
    return _METADATA.match(name) is not None


def sample_extensions(key: str, *, is_ids: bool) -> list[str]:
    """The extensions of members with the text of a sample, the first choice first."""
    name, default = ("ids", "npy") if is_ids else ("text", "txt")
    return [key, *[default] * (key == name), "json"]


def split_name(name: str) -> tuple[str, str]:
    """The key of the sample and the extension of a member."""
    directory, base = posixpath.split(name)
    stem, _, extension = base.partition(".")
    return posixpath.join(directory, stem), extension


def _text_of(source: Source, text_extensions: list[str], sample: _Sample) -> str:
    """The text of a complete sample. Raises BadRecordError."""
    try:
        if sample.problem:
            raise BadRecordError(sample.problem)
        for extension in text_extensions:
            if extension in sample.contents:
                return _text_of_member(source, extension, sample.contents[extension])
        seen = [printable(each)[:40] or "none" for each in sample.contents]
        raise BadRecordError(
            f"no member .{', .'.join(text_extensions)}; its extensions: {', '.join(seen[:10])} "
            "(see --text-key)"
        )
    except BadRecordError as error:
        raise BadRecordError(f"key {printable(sample.key)[:200]}: {error.reason}") from None


def _text_of_member(source: Source, extension: str, content: bytes) -> str:
    ids = source.file.ids
    content = content.removeprefix(BOM_UTF8)  # as of any file
    if extension == "json" and (ids or source.text_key != "json"):
        return text_of_line(content.rstrip() + b"\n", source.text_key, ids)
    if not ids:
        return source.decode(content)
    if extension != "npy" and not extension.endswith(".npy"):
        raise BadRecordError(f"member .{printable(extension)[:40]} is neither .npy nor .json")
    return text_of_npy(content, ids)
