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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
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
_FILES = {tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE}
_NOT_FILES = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a named pipe",
}


class Member(NamedTuple):
    """An entry of the archive, a file unless `is_folder`."""

    name: str
    """Always valid UTF-8; without "./" in front."""
    offset: int
    """Of its header, in the decompressed archive."""
    size: int
    problem: str
    """Why its content cannot be used, such as "a symbolic link"; "" for a regular file."""
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
    except (tarfile.TarError, ValueError, OverflowError) as error:
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
    is_known = header.type in _FILES or header.isdir() or header.type in _NOT_FILES
    if not is_known or header.size < 0 or (header.size and header.type not in _FILES):
        raise blocks.broken(
            f"member {shown} of type {header.type!r} and size {header.size:,}: unsupported or "
            "damaged"
        )
    blocks.require_plausible(header.offset_data + header.size)
    problem = _NOT_FILES.get(header.type, "") or path_problem(name)
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
        """The next bytes."""
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
            raise self.broken(error.reason) from error

    def broken(self, reason: str) -> BrokenStreamError:
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
    wanted: list[str]
    """The possible extensions of the text, the first choice first."""
    problem: str = ""
    offset: int = 0
    extensions: list[str] = field(default_factory=list)
    rank: int = 99
    """Position of the extension of `content` in `wanted`."""
    content: bytes = b""

    def add(self, member: Member) -> None:
        extension = split_name(member.name)[1]
        rank = self.wanted.index(extension) if extension in self.wanted else self.rank
        problem = f"is {member.problem}" if member.problem else ""
        if extension in self.extensions:
            problem = problem or "occurs twice"
        if not self.extensions:
            self.offset = member.offset
        self.extensions.append(extension)
        if rank < self.rank and member.size > MAX_RECORD_BYTES:
            problem = problem or f"is {too_long_error().reason}"
        if problem:
            self.problem = self.problem or f"member {printable(member.name)[:200]} {problem}"
        elif rank < self.rank and not self.problem:
            self.rank, self.content = rank, b"".join(member.chunks())


def read_tar(source: Source) -> Iterator[Record | Reject]:
    seen = set[bytes]()  # digests, because keys may be long
    wanted = sample_extensions(source.text_key, is_ids=source.file.ids is not None)
    members = filter(_belongs_to_sample, members_of_tar(source.stream, source.file.size))
    try:
        for key, group in groupby(members, lambda member: split_name(member.name)[0]):
            digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
            sample = _Sample(key, wanted)
            if digest in seen:
                sample.problem = "the key occurs twice; members of a sample must follow each other"
            elif len(key.encode()) > _MAX_KEY_BYTES:
                sample.problem = f"the key is longer than {_MAX_KEY_BYTES:,} bytes"
            seen.add(digest)
            for member in group:
                sample.add(member)
            yield from _documents(source, sample)
    except BrokenStreamError as error:
        raise BrokenStreamError(source.lines, error.byte, error.reason) from error


def _belongs_to_sample(member: Member) -> bool:
    is_hidden = not posixpath.basename(split_name(member.name)[0])
    return not (member.is_folder or is_hidden or is_metadata(member.name))


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


def _documents(source: Source, sample: _Sample) -> Iterator[Record | Reject]:
    """The documents of a complete sample: one, or one per line of .jsonl."""
    name = posixpath.basename(sample.key)
    may_be_metadata = name.startswith("__") and name.endswith("__")
    extension = sample.wanted[sample.rank] if sample.rank < len(sample.wanted) else ""
    if not sample.problem and not extension:
        members = ", ".join(printable(each)[:40] or "none" for each in sample.extensions[:10])
        sample.problem = (
            f"no member .{', .'.join(sample.wanted)}; its extensions: {members} (see --text-key)"
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
    return Record.of(text, line=line, key=key)


def _text_of(source: Source, content: bytes, extension: str, *, is_text_key: bool) -> str:
    is_json = extension in ("json", "jsonl") and not (is_text_key and not source.file.ids)
    if is_json:
        return text_of_line(content.rstrip() + b"\n", source.text_key, source.file.ids)
    if not source.file.ids:
        return decode(content)
    if extension != "npy" and not extension.endswith(".npy"):
        raise BadRecordError(0, f"member .{printable(extension)[:40]} is not .npy, .json or .jsonl")
    # Imported here: numpy is slow to import, and only these members need it.
    from data_pipeline.readers.ids import ids_of_npy, text_of_document

    return text_of_document(ids_of_npy(content), source.file.ids)
