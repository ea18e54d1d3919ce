"""Read the members of a tar archive from a stream, strictly, and never to disk.

`tarfile` of the standard library is not strict enough for input that may be damaged or hostile: it
takes a damaged header after the first member for the end of the archive, ignores archives that
follow the first, accepts a missing end, and reads extended headers of any size into memory. Here
each of these is an error. Only the parsing of one header block is tarfile's.

Source: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Header Block"; GNU tar manual, "Basic
Tar Format".
"""

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from data_pipeline.errors import printable
from data_pipeline.readers.expansion import require_plausible_size
from data_pipeline.readers.records import BrokenStreamError
from data_pipeline.readers.source import CHUNK_BYTES, Source, read_exactly
from data_pipeline.system.sources import reject_reason

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


@dataclass(frozen=True, slots=True)
class Member:
    """A file in the archive."""

    name: str
    """Always valid UTF-8; without "./" in front."""
    offset: int
    """Of its header, in the decompressed archive."""
    size: int
    problem: str
    """Why its content cannot be used, such as "a symbolic link"; "" for a regular file."""


class TarReader:
    """Iterates over the members, without directories. `content` reads the current member.

    Raises BrokenStreamError for an archive that cannot be read any further.
    """

    def __init__(self, source: Source) -> None:
        self._source, self._stream = source, source.stream
        self._position = 0
        self._unread = 0
        """Bytes of the current member and its padding that were not read."""
        self._size = 0

    def __iter__(self) -> Iterator[Member]:
        try:
            while member := self._next_member():
                yield member
        except OSError as error:
            raise self._broken(reject_reason(error)) from error

    def content(self) -> bytes:
        """The bytes of the current member. The caller has checked its size."""
        raw = self._read(self._size)
        self._unread -= self._size
        return raw

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
            if not extended["size"].isdecimal() or len(extended["size"]) > 18:
                raise self._broken(f"member {shown} has a damaged size")
            size = int(extended["size"])
        is_sparse = any(key.startswith("GNU.sparse") for key in extended)
        if header.type == tarfile.GNUTYPE_SPARSE or is_sparse:
            raise self._broken(f"member {shown} is sparse; archive it without --sparse")
        is_directory = header.type == tarfile.DIRTYPE
        if header.type not in _FILES | _NOT_FILES.keys() and not is_directory:
            raise self._broken(f"member {shown} has the unknown type {header.type!r}")
        if size < 0 or (size and header.type not in _FILES):
            raise self._broken(f"member {shown} has size {size:,}, which its type cannot have")
        require_plausible_size(self._position + size, self._source)
        self._size, self._unread = size, -(-size // _BLOCK) * _BLOCK
        if is_directory:
            return None
        problem = _NOT_FILES.get(header.type, "") or _path_problem(name)
        return Member(name.removeprefix("./"), offset, size, problem)

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
            require_plausible_size(self._position, self._source)
            if raw.count(0) != len(raw):
                raise self._broken("there is data after its end, such as another archive")

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
        return BrokenStreamError(self._source.lines, self._position, reason)


def _path_problem(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        return "a path that leaves the archive"
    return "a path that is not a name" if "\0" in name or not path.name else ""
