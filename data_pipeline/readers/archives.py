"""Archives of files: list the members of a zip or tar archive, and read each as if it were a file.

`open_archive` gives the open archive of this process: its members, in the order in which they lie.

Nothing is unpacked to disk. A member of a zip is decompressed from its own beginning, so several
workers read one archive. A member of a tar that is not compressed is a byte range of the file. A
compressed tar can only be read forwards: its members are read in the order in which they lie, and
what was read last is kept, so that the first bytes of a member can be examined and read again.

`zipfile` parses zip archives: it checks the CRC of every member, and refuses members that overlap.
Sources: PKWARE, "APPNOTE.TXT", sections 4.3 and 4.4; for tar, `tar.py`.
"""

import contextlib
import io
import math
import os
import re
import stat
import zipfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol

from data_pipeline.errors import printable
from data_pipeline.readers.records import BrokenStreamError
from data_pipeline.readers.source import CHUNK_BYTES, Source
from data_pipeline.readers.tar import TarReader, path_problem
from data_pipeline.system.sources import (
    Compression,
    DecompressedStream,
    SourceError,
    buffered,
    open_source,
    require_plausible_ratio,
)

if TYPE_CHECKING:
    from data_pipeline.readers.formats import InputFile

ArchiveKind = Literal["zip", "tar"]
ARCHIVES: dict[str, ArchiveKind] = {".zip": "zip", ".tar": "tar"}
"""The suffixes of archives that are read."""
ANY_ARCHIVE = {*ARCHIVES, ".7z", ".rar", ".lz4"}
DAMAGED = "The copy is damaged or incomplete; copy it again."
_HOSTILE = "It is damaged or hostile: do not unpack it."
_KEPT_BYTES = 40 * 2**20
"""The last bytes of a compressed tar that are kept. The kind of a file is decided by its first two
lines, of at most 16 MiB each."""
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
"""Of zip archives. `zipfile` decodes bzip2 and LZMA without a limit of RAM."""
_ENCRYPTED = 0x1 | 0x40 | 0x2000


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """A file in an archive."""

    archive: ArchiveKind
    packed: Compression
    """The compression of the archive as a whole."""
    name: str
    """The path in the archive, with slashes and without "./" in front."""
    offset: int
    """tar: of the content, in the decompressed archive; zip: of the header."""
    size: int
    """Decompressed bytes."""
    stored: int
    """Bytes in the file of the archive, for a compressed tar an estimate; 0 if `size` is."""

    @property
    def is_range(self) -> bool:
        """Whether the content is a byte range of the file of the archive, from `offset`."""
        return self.archive == "tar" and not self.packed

    @property
    def is_sequential(self) -> bool:
        """Whether the archive can only be read forwards."""
        return self.archive == "tar" and bool(self.packed)


class ArchiveError(ValueError):
    """An archive or one of its members cannot be used. Text and advice are for the user."""

    def __init__(self, reason: str, advice: str = "Unpack it and give the folder.") -> None:
        super().__init__(reason)
        self.advice = advice


class Archive(Protocol):
    """An open archive."""

    has_folders: bool
    """Whether it has entries for folders, of those that `members` read so far."""

    def members(self, file: "InputFile") -> Iterator[ArchiveMember]:
        """The regular files of the archive, which is `file`, in the order in which they lie.

        The member that was yielded last can be opened during the iteration. Raises ArchiveError for
        members that cannot be read or have unsafe paths, and for a damaged archive.
        """

    def open(self, member: ArchiveMember) -> BinaryIO:
        """The content of a member. Reading it raises SourceError if it is damaged."""


class _ZipArchive:
    has_folders = False

    def __init__(self, stream: BinaryIO) -> None:
        if not stream.seekable():
            raise SourceError("a .zip file needs random access, but its server has no byte ranges")
        try:
            self._zip = zipfile.ZipFile(stream)
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            if isinstance(error.__context__, SourceError):  # a server failed, not the archive
                raise error.__context__ from None
            raise SourceError(
                f"damaged or truncated zip archive: {printable(str(error))[:120]}"
            ) from error
        self._infos = {info.header_offset: info for info in self._zip.infolist()}

    def members(self, file: "InputFile") -> Iterator[ArchiveMember]:
        infos, total = self._zip.infolist(), 0
        for info in sorted(infos, key=lambda each: each.header_offset):
            name = info.orig_filename.replace("\\", "/")
            if re.match(r"[A-Za-z]:/", name):
                name = f"/{name}"  # a drive of Windows
            _require_safe_path(name)
            if name.endswith("/"):
                continue
            total += info.file_size
            _require_plausible_archive(total, file.size)
            _require_usable_zip_member(info)
            stored = max(info.compress_size, 1) if info.file_size else 0
            yield ArchiveMember(
                "zip", "", _cleaned(name), info.header_offset, info.file_size, stored
            )

    def open(self, member: ArchiveMember) -> BinaryIO:
        try:
            content = self._zip.open(self._infos[member.offset])
        except (KeyError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            reason = printable(str(error))[:120]
            raise SourceError(f"damaged zip archive at member {member.name}: {reason}") from error
        return buffered(DecompressedStream(content, "zip"))  # type: ignore[arg-type]


def _require_usable_zip_member(info: zipfile.ZipInfo) -> None:
    shown = printable(info.filename)[:200]
    mode = info.external_attr >> 16
    if info.flag_bits & _ENCRYPTED:
        raise ArchiveError(f"its member {shown} is encrypted")
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        raise ArchiveError(f"its member {shown} is a link or a device, not a file")
    if info.compress_type not in _METHODS:
        method = info.compress_type
        raise ArchiveError(
            f"its member {shown} is compressed with method {method}; only deflate is read"
        )


class _TarArchive:
    def __init__(self, path: str, packed: Compression, stream: BinaryIO) -> None:
        self._path, self._packed, self.has_folders = path, packed, False
        is_plain = not packed and stream.seekable()
        self._stream: Any = stream if is_plain else _ForwardStream(stream, self._again)
        self._reopened = contextlib.ExitStack()

    def _again(self) -> BinaryIO:
        """The stream of the archive from its beginning."""
        self._reopened.close()
        return self._reopened.enter_context(open_source(self._path, self._packed))

    def members(self, file: "InputFile") -> Iterator[ArchiveMember]:
        self._stream.seek(0)
        reader = TarReader(Source(file, self._stream, 0, math.inf, ""))
        try:
            for member in reader:
                self.has_folders = reader.has_folders
                _require_safe_path(member.name)
                if member.problem:
                    shown = printable(member.name)[:200]
                    raise ArchiveError(f"its member {shown} is {member.problem}")
                name, size, start = _cleaned(member.name), member.size, member.content_offset
                # The stored size of a member is unknown; text shrinks to about a third.
                stored = max(size // 3, 1) if self._packed and size else size
                yield ArchiveMember("tar", self._packed, name, start, size, stored)
                self._stream.seek(start)  # the member may have been read
        except BrokenStreamError as error:
            raise ArchiveError(error.reason, DAMAGED) from error

    def open(self, member: ArchiveMember) -> BinaryIO:
        return buffered(_MemberStream(self._stream, member))

    def close(self) -> None:
        self._reopened.close()


class _ForwardStream:
    """A stream that is not seekable, with its last bytes. Seeking further back begins again."""

    def __init__(self, stream: BinaryIO, again: Any) -> None:
        self._stream, self._again = stream, again
        self._read_bytes = 0
        self._position = 0
        self._kept: deque[bytes] = deque()
        self._num_kept = 0

    def seekable(self) -> bool:
        return False

    def seek(self, offset: int) -> int:
        if offset < self._read_bytes - self._num_kept:
            self._stream, self._read_bytes = self._again(), 0
            self._kept.clear()
            self._num_kept = 0
        self._position = min(offset, self._read_bytes)
        while self._position < offset and self.read(min(offset - self._position, CHUNK_BYTES)):
            pass
        return self._position

    def read(self, size: int) -> bytes:
        if self._position < self._read_bytes:
            data = self._kept_bytes(size)
        else:
            data = self._stream.read(size)
            self._read_bytes += len(data)
            if data:
                self._keep(data)
        self._position += len(data)
        return data

    def _keep(self, data: bytes) -> None:
        self._kept.append(data)
        self._num_kept += len(data)
        while self._num_kept - len(self._kept[0]) >= _KEPT_BYTES:
            self._num_kept -= len(self._kept.popleft())

    def _kept_bytes(self, size: int) -> bytes:
        """At least one of the bytes at the position, of those that are kept."""
        at = self._read_bytes
        for data in reversed(self._kept):
            at -= len(data)
            if at <= self._position:
                return data[self._position - at :][:size]
        raise ValueError(f"byte {self._position} is not kept")


class _MemberStream(io.RawIOBase):
    """The bytes of a member of a tar."""

    def __init__(self, stream: Any, member: ArchiveMember) -> None:
        self._stream, self._member, self._position = stream, member, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._stream.seekable()

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._member.size}
        self._position = max(origin[whence] + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._member.size - self._position)
        if size <= 0:
            return 0
        self._stream.seek(self._member.offset + self._position)
        data = self._stream.read(size)
        if not data:
            raise SourceError(f"truncated: it ends inside member {printable(self._member.name)}")
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _require_safe_path(name: str) -> None:
    """Raise ArchiveError for a path that would leave the folder where the archive is unpacked."""
    if problem := path_problem(name):
        raise ArchiveError(f"its member {printable(name)[:200]!r} is {problem}", _HOSTILE)


def _cleaned(name: str) -> str:
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _require_plausible_archive(num_bytes: int, stored_bytes: int) -> None:
    try:
        if stored_bytes:
            require_plausible_ratio(num_bytes, stored_bytes)
    except SourceError as error:
        raise ArchiveError(error.reason, _HOSTILE) from error


# --- the open archive of this process -------------------------------------------------------------

_open: tuple[tuple[str, str], Archive, contextlib.ExitStack] | None = None


def open_archive(path: str, mark: str, kind: ArchiveKind, packed: Compression) -> Archive:
    """The archive at `path`, which stays open for its next member. `mark` is its version.

    Raises OSError for a file that cannot be opened or is no archive.
    """
    global _open  # noqa: PLW0603 - a process reads one archive at a time; opening takes long
    if _open and _open[0] == (path, mark):
        return _open[1]
    close_archive()
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(open_source(path, packed))
        archive: _ZipArchive | _TarArchive
        if kind == "zip":
            archive = _ZipArchive(stream)
        else:
            archive = _TarArchive(path, packed, stream)
            stack.callback(archive.close)
        _open = (path, mark), archive, stack.pop_all()
    return archive


def close_archive() -> None:
    global _open  # noqa: PLW0603 - as above
    if _open:
        _, _, stack = _open
        _open = None
        stack.close()
