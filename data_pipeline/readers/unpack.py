"""Archives: which are unpacked, and unpacking .zip and .tar files that may be damaged or hostile.

An archive is read as the folder to which it unpacks: relative to the only folder at its top if
there is one. Hidden files are left out. Of a .tar, `--format auto` and `ids` read the samples of a
WebDataset (`tar.py`) instead if the names of its first MAX_EXAMINED files show that it is one
(`holds_samples`; docs/how_to/read_archives.md has the rules).

An archive is refused as a whole if it has a path outside of it, a link, an encrypted or nested
member or a member that occurs twice, or if it expands implausibly: skipping a member would lose
text silently. `zipfile` checks the CRC of every member, and since Python 3.11.8 refuses members
that overlap; before, the limit of the size holds for them, too.

Sources: PKWARE, "APPNOTE.TXT", sections 4.3 and 4.4; for tar, `tar.py`.
"""

import contextlib
import shutil
import stat
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from data_pipeline.errors import DataError, printable
from data_pipeline.readers.source import (
    ANY_ARCHIVE,
    CHUNK_BYTES,
    BrokenStreamError,
    InputFile,
    suffix_of,
)
from data_pipeline.readers.split_names import splits_of_names
from data_pipeline.readers.tar import (
    is_metadata,
    members_of_tar,
    path_problem,
    sample_extensions,
    split_name,
)
from data_pipeline.system.files import explain_disk_errors
from data_pipeline.system.sources import (
    SourceError,
    is_transient,
    reject_reason,
    require_plausible_ratio,
    shown,
)

UNPACKED = ".unpacked.tmp"
"""The folder inside the output in which archives are unpacked."""
MAX_EXAMINED = 1000
_MAX_EXAMINED_BYTES = 256 * 2**20
_TEXTS = {"txt", "text", "md", "rst"}
"""Extensions of members that are texts."""
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
"""Of zip archives. `zipfile` decodes bzip2 and LZMA without a limit of RAM."""
_ENCRYPTED = 0x1 | 0x40 | 0x2000


class ArchiveError(ValueError):
    """An archive or one of its members is refused. The text is for the user."""


# --- samples or folder ----------------------------------------------------------------------------


def holds_samples(file: InputFile, text_key: str, *, is_ids: bool) -> bool:
    """Whether "auto" and "ids" read a .tar file as a WebDataset, not as a packed folder."""
    names, has_folders = _first_names(file)
    keyed = groupby(map(split_name, names), key=lambda pair: pair[0])
    samples = [frozenset(extension for _, extension in pairs) for _, pairs in keyed]
    sets = Counter(extensions for extensions in samples if len(extensions) > 1)
    # Files of a folder, such as a.txt and a.de.txt: of a sample only one would be read.
    of_texts = {each for each in sets if text_key not in each and all(map(_is_text, each))}
    num_equal = max((count for each, count in sets.items() if each not in of_texts), default=0)
    if num_equal > 1 and 2 * num_equal >= len(samples):
        return True
    is_folder = has_folders and 2 * sum("/" in name for name in names) > len(names)
    have_splits = len({*splits_of_names(names, [""] * len(names))}) > 1
    extensions = sample_extensions(text_key, is_ids=is_ids)
    num_texts = sum(not sample.isdisjoint(extensions) for sample in samples)
    only_texts = bool(of_texts) and all(map(_is_text, frozenset().union(*samples)))
    return not (is_folder or have_splits or only_texts) and 2 * num_texts >= len(samples)


def _is_text(extension: str) -> bool:
    return extension.rpartition(".")[2].lower() in _TEXTS


def _first_names(file: InputFile) -> tuple[list[str], bool]:
    """The names of the first files, and whether there are entries for folders.

    A damaged or unsafe member is the end: the reader or `unpack` reports it.
    """
    names, num_bytes, has_folders = list[str](), 0, False
    with contextlib.suppress(OSError, BrokenStreamError), file.open() as stream:
        for member in members_of_tar(stream, file.size):
            name = _cleaned(member.name)
            has_folders |= member.is_folder
            if not (member.is_folder or is_metadata(name) or _is_hidden(name)):
                names.append(name)
            num_bytes += member.size
            is_costly = file.compression and num_bytes > _MAX_EXAMINED_BYTES
            is_refused = member.problem and not member.is_folder  # "." is a folder
            if is_refused or is_costly or len(names) == MAX_EXAMINED:
                break
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
    contents_of = _contents_of_zip if archive.suffix.name == ".zip" else _contents_of_tar
    with explain_disk_errors("unpacking", folder):
        folder.mkdir(parents=True)
    try:
        with archive.open() as stream:
            for name, chunks in contents_of(stream, archive.size):
                if _is_hidden(name):
                    continue
                if suffix_of(name).name in ANY_ARCHIVE:
                    raise ArchiveError(f"it holds the archive {printable(name)[:200]}")
                _write(folder, name, chunks)
    except ArchiveError as error:
        raise DataError(
            f"{shown(archive.path)}: {error}. It is damaged or hostile, or made for another "
            "purpose. If you trust it, unpack it and give the folder."
        ) from error
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        reason = printable(reject_reason(error) if isinstance(error, OSError) else str(error))
        advice = "The copy is damaged or incomplete; copy it again."
        if is_transient(error):
            advice = "Check the server and the network."
        raise DataError(f"{shown(archive.path)}: {reason.rstrip('.')[:200]}. {advice}") from error
    top = list(folder.iterdir())
    return top[0] if len(top) == 1 and top[0].is_dir() else folder


def _write(folder: Path, name: str, chunks: Iterator[bytes]) -> None:
    """Write the file `name`. Its path was checked, and no link is ever in `folder`."""
    path = folder / name
    with explain_disk_errors("unpacking", folder):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("xb")
        except (FileExistsError, NotADirectoryError):
            raise ArchiveError(f"its member {printable(name)[:200]} occurs twice") from None
    with file:
        for chunk in chunks:
            with explain_disk_errors("unpacking", folder):
                file.write(chunk)


def _contents_of_tar(stream: BinaryIO, stored_bytes: int) -> Iterator[tuple[str, Iterator[bytes]]]:
    """The files of a tar archive, each with its content. An unsafe member is an ArchiveError."""
    for member in members_of_tar(stream, stored_bytes):
        if not member.is_folder:
            _refuse(member.name, member.problem)
            yield _cleaned(member.name), member.chunks()


def _contents_of_zip(stream: BinaryIO, stored_bytes: int) -> Iterator[tuple[str, Iterator[bytes]]]:
    """As `_contents_of_tar`, of a zip archive. All members are checked before one is read."""
    if not stream.seekable():
        raise SourceError("a .zip file needs random access, but its server has no byte ranges")
    archive = zipfile.ZipFile(stream)
    infos = sorted(archive.infolist(), key=lambda each: each.header_offset)
    members = [(info, info.orig_filename.replace("\\", "/")) for info in infos]
    for info, name in members:
        _refuse(name, path_problem(name) or _problem_of_zip_member(info))
    if stored_bytes:
        require_plausible_ratio(sum(info.file_size for info in infos), stored_bytes)
    for info, name in members:
        if not name.endswith("/"):
            with archive.open(info) as file:
                yield _cleaned(name), iter(partial(file.read, CHUNK_BYTES), b"")


def _problem_of_zip_member(info: zipfile.ZipInfo) -> str:
    mode, method = stat.S_IFMT(info.external_attr >> 16), info.compress_type
    problems = {
        "encrypted": info.flag_bits & _ENCRYPTED,
        "a link or a device, not a file": mode not in (0, stat.S_IFREG, stat.S_IFDIR),
        f"of method {method}; only deflate is read": method not in _METHODS,
    }
    return next((problem for problem, is_so in problems.items() if is_so), "")


def _refuse(name: str, problem: str) -> None:
    if problem:
        raise ArchiveError(f"its member {printable(name)[:200]} is {problem}")
