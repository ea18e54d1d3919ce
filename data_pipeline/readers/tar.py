"""tar: a WebDataset. Members with the same key are a sample, and every sample is a document.

The key is the path up to the first dot of the file name; the rest is the extension. The id of the
document is `FILE:KEY`. Its text is that of the first of these members that the sample has:

1. the extension `--text-key`, such as `caption.txt`
2. only with the default key: `.txt`, or `.npy` with `--format ids`
3. `.json`: an object with the text at `--text-key`
4. `.jsonl`: one document per line, with the ids `FILE:KEY:LINE`

Other members (images, labels) are skipped, and samples named `__NAME__` that have no text, such as
`__meta__.json`. Nothing is written to disk or loaded by name.

`tarfile` of the standard library is not strict enough for input that may be damaged or hostile: it
takes a damaged header after the first member for the end of the archive, ignores archives that
follow the first, accepts a missing end, and reads extended headers of any size into RAM. Here
each of these is an error. Only the parsing of one header block is tarfile's.

Sources: webdataset, `tariterators.group_by_keys` and `base_plus_ext`; POSIX.1-2017, pax, "ustar
Interchange Format" and "pax Header Block"; GNU tar manual, "Basic Tar Format".
"""

import hashlib
import os
import posixpath
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import BinaryIO, NamedTuple

from data_pipeline.errors import printable
from data_pipeline.readers.lines import text_of_line
from data_pipeline.readers.records import (
    MAX_RECORD_BYTES,
    BadRecordError,
    BrokenStreamError,
    Record,
    Reject,
    decode,
)
from data_pipeline.readers.source import CHUNK_BYTES, Source, read_exactly, too_long_error
from data_pipeline.system.sources import SourceError, require_plausible_ratio

_MAX_KEY_BYTES = 4096
_METADATA = re.compile(r"__[^/]*__(/|\Z)")
"""Members that webdataset skips too."""
_BLOCK = 512
_MAX_EXTENDED_BYTES = 2**20
"""Limit of an extended header. It holds a path and times, hundreds of bytes."""
_FILES = {tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE}
_NOT_FILES = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a named pipe",
}


class Member(NamedTuple):
    """A file in the archive."""

    name: str
    """Always valid UTF-8; without "./" in front."""
    offset: int
    """Of its header, in the decompressed archive."""
    size: int
    problem: str
    """Why its content cannot be used, such as "a symbolic link"; "" for a regular file."""
    content_offset: int


class TarReader:
    """Iterates over the members, without directories. `chunks` reads the current member.

    `stored_bytes` is the size of the archive in its file, 0 if it is unknown. Raises
    BrokenStreamError for an archive that cannot be read any further.
    """

    def __init__(self, stream: BinaryIO, stored_bytes: int) -> None:
        self._stream, self._stored_bytes = stream, stored_bytes
        self._position = 0
        self._unread = 0
        """Bytes of the current member and its padding that were not read."""
        self._size = 0
        self.has_folders = False
        """Whether there were entries for folders."""

    def __iter__(self) -> Iterator[Member]:
        return iter(self._next_member, None)

    def chunks(self) -> Iterator[bytes]:
        """The bytes of the current member."""
        left = self._size
        while left:
            raw = self._read(min(left, CHUNK_BYTES))
            left -= len(raw)
            self._unread -= len(raw)
            yield raw

    def _next_member(self) -> Member | None:
        """The next member that is not a directory; None at the end of the archive."""
        extended: dict[str, str] = {}
        while True:
            self._skip()
            offset = self._position
            header = self._read_header()
            if header is None:
                if extended:
                    raise self._broken("an extended header is not followed by a member")
                return None
            if header.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE):
                records = self._read_pax(header)
                if header.type == tarfile.XGLTYPE:
                    if records.keys() & {"path", "size"}:
                        raise self._broken("a global header sets the path or size of all members")
                else:
                    extended |= records
            elif header.type == tarfile.GNUTYPE_LONGNAME:
                raw = self._read_extended(header).split(b"\0")[0]
                extended["path"] = os.fsdecode(raw)
            elif header.type == tarfile.GNUTYPE_LONGLINK:
                self._read_extended(header)
            else:
                if member := self._member(header, extended, offset):
                    return member
                extended = {}

    def _member(
        self, header: tarfile.TarInfo, extended: dict[str, str], offset: int
    ) -> Member | None:
        """The member of a header, or None for a directory. Sets the bytes to read or skip."""
        path = extended.get("path", header.name)
        name = os.fsencode(path).decode("utf-8", errors="backslashreplace")
        shown = printable(name)[:200]
        size = header.size
        if "size" in extended:
            is_number = extended["size"].isdecimal() and len(extended["size"]) <= 18
            size = int(extended["size"]) if is_number else -1
        if header.type == tarfile.GNUTYPE_SPARSE or any("GNU.sparse" in key for key in extended):
            raise self._broken(f"member {shown} is sparse; archive it without --sparse")
        is_directory = header.type == tarfile.DIRTYPE
        may_have_content = header.type in _FILES
        is_known = may_have_content or is_directory or header.type in _NOT_FILES
        if not is_known or size < 0 or (size and not may_have_content):
            raise self._broken(
                f"member {shown} of type {header.type!r} and size {size:,}: unsupported or damaged"
            )
        self._require_plausible(self._position + size)
        self._size, self._unread = size, -(-size // _BLOCK) * _BLOCK
        if is_directory:
            self.has_folders = True
            return None
        problem = _NOT_FILES.get(header.type, "") or path_problem(name)
        return Member(name.removeprefix("./"), offset, size, problem, self._position)

    def _read_header(self) -> tarfile.TarInfo | None:
        """The next header block, or None at the end, which must be marked."""
        raw = read_exactly(self._stream, _BLOCK)
        self._position += len(raw)
        try:
            return tarfile.TarInfo.frombuf(raw, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            if len(raw) < _BLOCK:
                kind = "truncated: the archive has no end mark" if self._position else "empty"
                raise self._broken(kind) from None
            if any(raw):
                kind = "not a tar archive" if self._position == _BLOCK else "damaged header"
                raise self._broken(f"{kind} ({error})") from None
        self._require_end()
        return None

    def _require_end(self) -> None:
        while raw := self._stream.read(CHUNK_BYTES):
            self._position += len(raw)
            self._require_plausible(self._position)
            if raw.count(0) != len(raw):
                raise self._broken("there is data after its end, such as another archive")

    def _require_plausible(self, num_bytes: int) -> None:
        """Raise BrokenStreamError if `num_bytes` is implausible for the size of the archive."""
        try:
            if self._stored_bytes:
                require_plausible_ratio(num_bytes, self._stored_bytes)
        except SourceError as error:
            raise self._broken(error.reason) from error

    def _read_pax(self, header: tarfile.TarInfo) -> dict[str, str]:
        """The records "LENGTH KEY=VALUE\\n" of a pax header."""
        raw, records = self._read_extended(header), {}
        while raw := raw.lstrip(b"\0"):
            length, _, _ = raw.partition(b" ")
            size = int(length) if length.isdigit() and len(length) < 8 else 0
            key, equals, value = raw[len(length) + 1 : size].partition(b"=")
            if size < 5 or len(raw) < size or not equals or not value.endswith(b"\n"):
                raise self._broken("damaged extended header")
            records[os.fsdecode(key)] = os.fsdecode(value[:-1])
            raw = raw[size:]
        return records

    def _read_extended(self, header: tarfile.TarInfo) -> bytes:
        if not 0 <= header.size <= _MAX_EXTENDED_BYTES:
            raise self._broken(f"an extended header declares {header.size:,} bytes")
        padded = -(-header.size // _BLOCK) * _BLOCK
        return self._read(padded)[: header.size]

    def _read(self, size: int) -> bytes:
        raw = read_exactly(self._stream, size)
        self._position += len(raw)
        if len(raw) < size:
            raise self._broken("truncated: it ends inside a member")
        return raw

    def _skip(self) -> None:
        """Skip what is left of the current member."""
        unread, self._unread = self._unread, 0
        if unread > CHUNK_BYTES and self._stream.seekable():
            self._position = self._stream.seek(self._position + unread)
            return
        while unread:
            unread -= len(self._read(min(unread, CHUNK_BYTES)))

    def _broken(self, reason: str) -> BrokenStreamError:
        return BrokenStreamError(0, self._position, reason)


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
    offset: int
    extensions: list[str] = field(default_factory=list)
    rank: int = 99
    """Position of the extension of `content` among the possible ones; less is better."""
    content: bytes = b""
    problem: str = ""


def read_tar(source: Source) -> Iterator[Record | Reject]:
    try:
        yield from _read_samples(source)
    except BrokenStreamError as error:
        raise BrokenStreamError(source.lines, error.byte, error.reason) from error


def _read_samples(source: Source) -> Iterator[Record | Reject]:
    members, seen = TarReader(source.stream, source.stored_bytes), set[bytes]()
    wanted = sample_extensions(source.text_key, is_ids=source.ids is not None)
    sample: _Sample | None = None
    for member in members:
        key, extension = split_name(member.name)
        if is_metadata(member.name) or not posixpath.basename(key):
            continue  # the second: hidden files
        if not sample or key != sample.key:
            if sample:
                yield from _documents(source, sample, wanted)
            sample = _begin(source, key, member, seen)
        _add_member(sample, members, member, extension, wanted)
    if sample:
        yield from _documents(source, sample, wanted)


def is_metadata(name: str) -> bool:
    """Whether a member describes the dataset, as `__meta__.json`."""
    return _METADATA.match(name) is not None


def sample_extensions(key: str, *, is_ids: bool) -> list[str]:
    """The extensions of members with the text of a sample, the first choice first."""
    default = [("ids", "npy")] if is_ids else [("text", "txt")]
    others = [extension for name, extension in default if key == name]
    return [key, *others, "json", "jsonl"]


def split_name(name: str) -> tuple[str, str]:
    """The key of the sample and the extension of a member."""
    directory, base = posixpath.split(name)
    stem, _, extension = base.partition(".")
    return posixpath.join(directory, stem), extension


def _begin(source: Source, key: str, member: Member, seen: set[bytes]) -> _Sample:
    sample = _Sample(key, member.offset)
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()  # keys may be long
    if digest in seen:
        sample.problem = "the key occurs twice; members of a sample must follow each other"
    seen.add(digest)
    if len(key.encode()) > _MAX_KEY_BYTES:
        sample.problem = f"the key is longer than {_MAX_KEY_BYTES:,} bytes"
    return sample


def _add_member(
    sample: _Sample, members: TarReader, member: Member, extension: str, wanted: list[str]
) -> None:
    rank = wanted.index(extension) if extension in wanted else sample.rank
    problem = f"is {member.problem}" if member.problem else ""
    if extension in sample.extensions:
        problem = problem or "occurs twice"
    sample.extensions.append(extension)
    if rank < sample.rank and member.size > MAX_RECORD_BYTES:
        problem = problem or f"is {too_long_error().reason}"
    if problem:
        sample.problem = sample.problem or f"member {printable(member.name)[:200]} {problem}"
    elif rank < sample.rank and not sample.problem:
        sample.rank, sample.content = rank, b"".join(members.chunks())


def _documents(source: Source, sample: _Sample, wanted: list[str]) -> Iterator[Record | Reject]:
    """The documents of a complete sample: one, or one per line of .jsonl."""
    name = posixpath.basename(sample.key)
    may_be_metadata = name.startswith("__") and name.endswith("__")
    extension = wanted[sample.rank] if sample.rank < len(wanted) else ""
    if not sample.problem and not extension:
        members = ", ".join(printable(each)[:40] or "none" for each in sample.extensions[:10])
        sample.problem = (
            f"no member .{', .'.join(wanted)}; its extensions: {members} (see --text-key)"
        )
    parts = [(sample.key, sample.content)]
    if extension == "jsonl" and sample.rank and not sample.problem:
        lines = enumerate(sample.content.split(b"\n"), start=1)
        parts = [(f"{sample.key}:{number}", line) for number, line in lines if line.strip()]
    for key, content in parts:
        document = _document(source, sample, key, content, extension)
        if not (may_be_metadata and isinstance(document, Reject)):
            source.lines += 1
            yield document


def _document(
    source: Source, sample: _Sample, key: str, content: bytes, extension: str
) -> Record | Reject:
    line = source.lines + 1
    try:
        if sample.problem:
            raise BadRecordError(0, sample.problem)
        text = _text_of(source, content, extension, is_text_key=sample.rank == 0)
    except BadRecordError as error:
        reason = f"key {printable(key)[:200]}: {error.reason}"
        return source.reject(line, sample.offset, reason)
    return Record.of(text, offset=sample.offset, size=len(content), line=line, key=key)


def _text_of(source: Source, content: bytes, extension: str, *, is_text_key: bool) -> str:
    is_json = extension in ("json", "jsonl") and not (is_text_key and not source.ids)
    if is_json:
        return text_of_line(content.rstrip() + b"\n", source.text_key, source.ids)
    if not source.ids:
        return decode(content)
    if extension != "npy" and not extension.endswith(".npy"):
        raise BadRecordError(0, f"member .{printable(extension)[:40]} is not .npy, .json or .jsonl")
    # Imported here: numpy is slow to import, and only these members need it.
    from data_pipeline.readers.ids import ids_of_npy, text_of_document

    return text_of_document(ids_of_npy(content), source.ids)
