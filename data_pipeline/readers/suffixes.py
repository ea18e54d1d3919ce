"""What the suffix of a file name says: compression, archive, a binary format."""

import posixpath
from typing import NamedTuple

from data_pipeline.system.sources import Compression

ARCHIVES = (".zip", ".tar")
"""The suffixes of archives that are read."""
ANY_ARCHIVE = {*ARCHIVES, ".7z", ".rar", ".lz4"}
NOT_TEXT = {
    *(".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".ico", ".tif", ".tiff"),
    *(".mp3", ".ogg", ".wav", ".flac", ".mp4", ".mkv", ".avi", ".webm", ".mov"),
    *(".ttf", ".otf", ".woff", ".woff2", ".pyc", ".so", ".o", ".a", ".exe", ".dll"),
}
"""Suffixes of binary files: ignored in folders, as archives, and counted. All other files must be
UTF-8."""
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

    @property
    def compression(self) -> Compression:
        return _COMPRESSIONS.get(self.packed, "")


def suffix_of(name: str) -> Suffix:
    stem, last = posixpath.splitext(name.lower())
    if last in _PACKED_TARS:
        return Suffix(".tar", _PACKED_TARS[last])
    if last in _COMPRESSIONS:
        return Suffix(posixpath.splitext(stem)[1], last)
    return Suffix(last, "")
