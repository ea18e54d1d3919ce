"""A file of the input: its address, its name, and its suffix.

`find.py` finds the files, `kinds.py` decides the kind of each, `formats.py` reads them.
"""

import posixpath
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO, NamedTuple

from data_pipeline.readers.records import IdRules
from data_pipeline.system.sources import Compression, open_source

ARCHIVES = (".zip", ".tar")
"""The suffixes of archives that are read."""
ANY_ARCHIVE = {*ARCHIVES, ".7z", ".rar", ".lz4"}
_COMPRESSIONS: dict[str, Compression] = {
    **{".gz": "gz", ".gzip": "gz", ".zst": "zst", ".zstd": "zst"},
    **{".bz2": "bz2", ".bz": "bz2", ".xz": "xz"},
}
_PACKED_TARS = {".tgz": ".gz", ".tzst": ".zst", ".tbz": ".bz2", ".tbz2": ".bz2", ".txz": ".xz"}


class Suffix(NamedTuple):
    """The suffix of a file name in lower case, split at the compression."""

    name: str
    """The suffix without that of the compression."""
    packed: str
    """The suffix of the compression, or an empty string."""

    def __str__(self) -> str:
        return self.name + self.packed or "without suffix"


def suffix_of(name: str) -> Suffix:
    stem, last = posixpath.splitext(name.lower())
    if last in _PACKED_TARS:
        return Suffix(".tar", _PACKED_TARS[last])
    if last in _COMPRESSIONS:
        return Suffix(posixpath.splitext(stem)[1], last)
    return Suffix(last, "")


def index_path(path: str) -> str:
    """The path or URL of the .idx file with the bounds of the documents in a .bin file."""
    return path.removesuffix(".bin") + ".idx"


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file to read."""

    path: str
    """A local path or a URL."""
    name: str
    """The path relative to the input folder, always valid UTF-8."""
    size: int = 0
    """Stored bytes when the file was listed; 0 if unknown."""
    mark: str = ""
    """A version mark: modification time or entity tag. "" if the file system has none."""
    kind: str = ""
    """A key of FORMATS, or of ID_FORMATS for files of token ids; "" until it is decided."""
    ids: IdRules | None = None
    """Set if the documents are token ids instead of text."""
    is_spilled: bool = False
    """Whether its texts are written to a spill file when they are located, because they cannot be
    read again from their place in the file. `find.py` decides it with the kind."""
    split: str = ""
    """The split that the input gives to the file (`split_names.py`); "" if it gives none."""
    keeps_nul: bool = False
    """Whether NUL bytes are text (`--format text`), not the sign of a binary file."""
    next_paths: tuple[str, ...] = ()
    """wikitext_rows: files in which the content of this one continues; `size` and `mark` include
    theirs."""
    archive: str = ""
    """The address of the archive from which `path` was unpacked; `mark` is then that of it."""
    member: str = ""
    """The path in this archive."""

    @property
    def suffix(self) -> Suffix:
        return suffix_of(self.name)

    @property
    def compression(self) -> Compression:
        return _COMPRESSIONS.get(self.suffix.packed, "")

    def open(self) -> AbstractContextManager[BinaryIO]:
        """The decompressed stream, as `open_source`."""
        return open_source(self.path, self.compression)

    def first_bytes(self, size: int) -> bytes:
        """The first `size` decompressed bytes; fewer if there are fewer or reading fails."""
        try:
            with self.open() as stream:
                return stream.read(size)
        except OSError:  # the reader reports it
            return b""

    def first_lines(self, size: int) -> list[bytes]:
        """The first two lines that are not blank, cut to `size` bytes; none if reading fails."""
        try:
            with self.open() as stream:
                lines: Iterator[bytes] = iter(lambda: stream.readline(size), b"")
                unmarked = (line.removeprefix(BOM_UTF8) for line in lines)
                return list(islice((line for line in unmarked if line.strip()), 2))
        except OSError:  # the reader reports the error
            return []

    @property
    def place(self) -> str:
        """The address for the user: `path`, or that of the member of an archive."""
        return f"{self.archive}/{self.member}" if self.archive else self.path
