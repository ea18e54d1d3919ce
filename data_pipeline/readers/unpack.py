"""Archives: which are unpacked, and unpacking .zip and .tar files that may be damaged or hostile.

An archive is read as the folder to which it unpacks: relative to the only folder at its top if
there is one. Hidden files are left out. Of a .tar, `--format auto` and `ids` read the samples of a
WebDataset (`tar.py`) instead if, of its first MAX_EXAMINED files,

1. most samples have several members with the same extensions: 0.jpg, 0.txt, 1.jpg, 1.txt; or
2. most samples have a member with a text (0.json, 1.json), and nothing shows that a folder was
   packed: the archive has entries for folders, with most files in them; or the name of a file
   gives a split; or names of folders separate a split from other files.

`--format tar` always reads samples, the format of a file (`--format text`) always a folder.

An archive is refused as a whole if it has a path outside of it, a link, an encrypted or nested
member or a member that occurs twice, or if it expands implausibly: skipping a member would lose
text silently. `zipfile` checks the CRC of every member and refuses members that overlap.

Sources: PKWARE, "APPNOTE.TXT", sections 4.3 and 4.4; for tar, `tar.py`.
"""

import contextlib
import errno
import posixpath
import re
import shutil
import stat
import zipfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from data_pipeline.errors import DataError, printable
from data_pipeline.readers.formats import ANY_ARCHIVE, InputFile, suffix_of
from data_pipeline.readers.records import BrokenStreamError
from data_pipeline.readers.source import CHUNK_BYTES
from data_pipeline.readers.split_names import split_of_words, splits_of_names
from data_pipeline.readers.tar import (
    TarReader,
    is_metadata,
    path_problem,
    sample_extensions,
    split_name,
)
from data_pipeline.system.files import explain_disk_errors
from data_pipeline.system.sources import (
    DecompressedStream,
    SourceError,
    buffered,
    is_transient,
    reject_reason,
    require_plausible_ratio,
    shown,
)

UNPACKED = ".unpacked.tmp"
"""The folder inside the output in which archives are unpacked."""
MAX_EXAMINED = 1000
_MAX_EXAMINED_BYTES = 256 * 2**20
MAX_MEMBERS = 1_000_000
"""Maximum number of files in an archive."""
_DAMAGED = "The copy is damaged or incomplete; copy it again."
_HOSTILE = "It is damaged or hostile: do not unpack it."
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
"""Of zip archives. `zipfile` decodes bzip2 and LZMA without a limit of RAM."""
_ENCRYPTED = 0x1 | 0x40 | 0x2000


class ArchiveError(ValueError):
    """An archive or one of its members cannot be used. Text and advice are for the user."""

    def __init__(self, reason: str, advice: str = "Unpack it and give the folder.") -> None:
        super().__init__(reason)
        self.advice = advice


# --- samples or folder ----------------------------------------------------------------------------


class ArchiveLayout(NamedTuple):
    """How an archive is read."""

    is_samples: bool
    """Whether it is a WebDataset."""
    reason: str
    """Why, for the user; "" for a .zip, which is always read as a folder."""


def layout_of_tar(file: InputFile, text_key: str, *, is_ids: bool) -> ArchiveLayout:
    """How "auto" and "ids" read a .tar file; see the module docstring."""
    try:
        names, has_folders = _first_names(file)
    except (OSError, BrokenStreamError):  # the reader reports it
        return ArchiveLayout(is_samples=True, reason="")
    keyed = groupby(map(split_name, names), key=lambda pair: pair[0])
    samples = [frozenset(extension for _, extension in pairs) for _, pairs in keyed]
    sets = Counter(extensions for extensions in samples if len(extensions) > 1)
    num_equal = max(sets.values(), default=0)
    if num_equal > 1 and 2 * num_equal >= len(samples):
        reason = "its files form samples with the same extensions (--format text reads a folder)"
        return ArchiveLayout(is_samples=True, reason=reason)
    in_folders = has_folders and 2 * sum("/" in name for name in names) > len(names)
    have_splits = any(split_of_words(posixpath.basename(name), outer=True) for name in names)
    differ = len({*splits_of_names(names, [""] * len(names))}) > 1
    extensions = sample_extensions(text_key, is_ids=is_ids)
    num_texts = sum(not sample.isdisjoint(extensions) for sample in samples)
    if not (in_folders or have_splits or differ) and 2 * num_texts >= len(samples):
        reason = "its files are samples with a text (--format text reads a folder)"
        return ArchiveLayout(is_samples=True, reason=reason)
    reason = "its files form no samples of a WebDataset (--format tar reads samples)"
    return ArchiveLayout(is_samples=False, reason=reason)


def _first_names(file: InputFile) -> tuple[list[str], bool]:
    """The names of the first files, and whether there are entries for folders before the last.

    A damaged or unsafe member counts as the end, unless it is the first.
    """
    names, num_bytes, has_folders = list[str](), 0, False
    with file.open() as stream:
        reader = TarReader(stream, file.size)
        try:
            for member in islice(reader, MAX_EXAMINED):
                has_folders = reader.has_folders
                if member.problem:
                    raise BrokenStreamError(0, member.offset, member.problem)
                name = _cleaned(member.name)
                if not (is_metadata(name) or _is_hidden(name)):
                    names.append(name)
                num_bytes += member.size
                if file.compression and num_bytes > _MAX_EXAMINED_BYTES:
                    break
        except BrokenStreamError:
            if not num_bytes:
                raise
    return names, has_folders


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or "/." in name


def _cleaned(name: str) -> str:
    return "/".join(part for part in name.split("/") if part not in ("", "."))


# --- unpacking ------------------------------------------------------------------------------------


@contextlib.contextmanager
def removed_afterwards(folder: Path) -> Iterator[Path]:
    """Remove `folder`, in which archives are unpacked: at the end, and what a killed run left."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unpack(archive: InputFile, folder: Path) -> Path:
    """Write the visible files of an archive below `folder`, which does not exist.

    Returns the folder with its content: the only folder at its top if there is one. Raises
    DataError for an archive that cannot be read or has a member that is refused, and
    UnfinishedError for a full or failing disk.
    """
    members_of = _members_of_zip if suffix_of(archive.name).name == ".zip" else _members_of_tar
    with explain_disk_errors("unpacking", folder):
        folder.mkdir(parents=True)
    try:
        with archive.open() as stream:
            num_files = 0
            for name, chunks in members_of(stream, archive.size):
                if _is_hidden(name):
                    continue
                if suffix_of(name).name in ANY_ARCHIVE:
                    raise ArchiveError(f"it holds the archive {printable(name)[:200]}")
                num_files += 1
                if num_files > MAX_MEMBERS:
                    raise ArchiveError(f"it has more than {MAX_MEMBERS:,} files")
                _write(folder, name, chunks)
    except BrokenStreamError as error:
        raise DataError(f"{shown(archive.path)}: {error.reason}. {_DAMAGED}") from error
    except ArchiveError as error:
        raise DataError(f"{shown(archive.path)}: {error}. {error.advice}") from error
    except OSError as error:
        advice = "Check the server and the network." if is_transient(error) else _DAMAGED
        reason = reject_reason(error).removesuffix(".")
        raise DataError(f"{shown(archive.path)}: {reason}. {advice}") from error
    top = list(folder.iterdir())
    return top[0] if len(top) == 1 and top[0].is_dir() else folder


def _write(folder: Path, name: str, chunks: Iterator[bytes]) -> None:
    """Write the file `name`. Its path was checked, and no link is ever in `folder`."""
    path, shown_name = folder / name, printable(name)[:200]
    with explain_disk_errors("unpacking", folder):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("xb")
        except (FileExistsError, NotADirectoryError):
            raise ArchiveError(f"its member {shown_name} occurs twice") from None
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise ArchiveError(f"its member {shown_name} has a name that is too long") from None
    with file:
        for chunk in chunks:
            with explain_disk_errors("unpacking", folder):
                file.write(chunk)


def _members_of_tar(stream: BinaryIO, stored_bytes: int) -> Iterator[tuple[str, Iterator[bytes]]]:
    """The files of a tar archive, each with its content. An unsafe member is an ArchiveError."""
    reader = TarReader(stream, stored_bytes)
    for member in reader:
        _require_safe_path(member.name)
        if member.problem:
            name = printable(member.name)[:200]
            raise ArchiveError(f"its member {name} is {member.problem}")
        yield _cleaned(member.name), reader.chunks()


def _members_of_zip(stream: BinaryIO, stored_bytes: int) -> Iterator[tuple[str, Iterator[bytes]]]:
    """As `_members_of_tar`, of a zip archive. All members are checked before the first is read."""
    if not stream.seekable():
        raise SourceError("a .zip file needs random access, but its server has no byte ranges")
    try:
        archive = zipfile.ZipFile(stream)
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        if isinstance(error.__context__, SourceError):  # a server failed, not the archive
            raise error.__context__ from None
        reason = printable(str(error))[:120]
        raise SourceError(f"damaged or truncated zip archive: {reason}") from error
    names, total = {}, 0
    for info in sorted(archive.infolist(), key=lambda each: each.header_offset):
        name = info.orig_filename.replace("\\", "/")
        if re.match(r"[A-Za-z]:/", name):
            name = f"/{name}"  # a drive of Windows
        _require_safe_path(name)
        if not name.endswith("/"):
            total += info.file_size
            _require_usable_zip_member(info)
            names[info] = _cleaned(name)
    try:
        if stored_bytes:
            require_plausible_ratio(total, stored_bytes)
    except SourceError as error:
        raise ArchiveError(error.reason, _HOSTILE) from error
    for info, name in names.items():
        try:
            content = archive.open(info)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            shown_name, reason = printable(name)[:200], printable(str(error))[:120]
            raise SourceError(f"damaged zip archive at member {shown_name}: {reason}") from error
        with buffered(DecompressedStream(content, "zip")) as file:  # type: ignore[arg-type]
            yield name, iter(partial(file.read, CHUNK_BYTES), b"")


def _require_usable_zip_member(info: zipfile.ZipInfo) -> None:
    name, mode, method = (
        printable(info.filename)[:200],
        info.external_attr >> 16,
        info.compress_type,
    )
    if info.flag_bits & _ENCRYPTED:
        raise ArchiveError(f"its member {name} is encrypted")
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        raise ArchiveError(f"its member {name} is a link or a device, not a file")
    if method not in _METHODS:
        raise ArchiveError(
            f"its member {name} is compressed with method {method}; only deflate is read"
        )


def _require_safe_path(name: str) -> None:
    """Raise ArchiveError for a path that would leave the folder where the archive is unpacked."""
    if problem := path_problem(name):
        raise ArchiveError(f"its member {printable(name)[:200]!r} is {problem}", _HOSTILE)
