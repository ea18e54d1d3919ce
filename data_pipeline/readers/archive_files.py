"""The files of an archive, as if it were unpacked, and which tar archives are WebDatasets instead.

The names of the files are those in the folder that unpacking would give: relative to the only
folder at the top of the archive, or to the archive if it has several files or folders there.
Hidden files are ignored. So an archive and its unpacked folder give the same documents, ids, splits
and shards.

`--format auto` and `ids` read a tar as a WebDataset (`tar.py`) if, of its first MAX_EXAMINED files,

1. most samples have several members with the same extensions: 0.jpg, 0.txt, 1.jpg, 1.txt; or
2. most samples have a member with a text (0.json, 1.json), and nothing shows that a folder was
   packed: the archive has entries for folders, with most files in them; or the name of a file
   gives a split; or names of folders separate a split from other files.

Otherwise, and with the format of a file (`--format text`), it is read as a folder. `--format tar`
always reads samples.
"""

import os
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path, PurePosixPath

from data_pipeline.errors import DataError, printable
from data_pipeline.readers.archives import (
    ANY_ARCHIVE,
    ARCHIVES,
    DAMAGED,
    Archive,
    ArchiveError,
    ArchiveKind,
    open_archive,
)
from data_pipeline.readers.formats import Format, InputFile
from data_pipeline.readers.kinds import suffix_of
from data_pipeline.readers.names import (
    is_pattern,
    name_in_utf8,
    split_of_words,
    split_pattern,
    splits_of_names,
)
from data_pipeline.readers.tar import is_metadata, sample_extensions, split_name
from data_pipeline.system.sources import is_transient, local_path, reject_reason, shown

MAX_EXAMINED = 1000
_MAX_EXAMINED_BYTES = 256 * 2**20
MAX_MEMBERS = 1_000_000
"""Limit of the files of an archive. One takes about 1 kB of RAM."""


@dataclass(frozen=True, slots=True)
class ArchiveLayout:
    """How an archive is read."""

    is_samples: bool
    """Whether it is a WebDataset."""
    reason: str
    """Why, for the user; "" for a .zip, which is always read as a folder."""


def archive_kind(name: str) -> ArchiveKind | None:
    """The kind of archive that the name of a file says; None for other files."""
    return ARCHIVES.get(suffix_of(name).name)


def layout_of(file: InputFile, format: Format, text_key: str, *, is_ids: bool) -> ArchiveLayout:
    """How to read an archive; see the module docstring."""
    if archive_kind(file.name) == "zip" or format not in ("auto", "tar", "ids"):
        return ArchiveLayout(is_samples=False, reason="")
    if format == "tar":
        return ArchiveLayout(is_samples=True, reason="")
    try:
        archive = _opened(file)
        names = list(_first_names(archive, file))
    except (OSError, ArchiveError):  # the reader reports it
        return ArchiveLayout(is_samples=True, reason="")
    in_folders = archive.has_folders and 2 * sum("/" in name for name in names) > len(names)
    have_splits = any(split_of_words(posixpath.basename(name), outer=True) for name in names)
    differ = len({*splits_of_names(names, [""] * len(names))}) > 1
    is_packed_folder = in_folders or have_splits or differ
    return _layout_of_names(
        names, sample_extensions(text_key, is_ids=is_ids), is_packed_folder=is_packed_folder
    )


def _first_names(archive: Archive, file: InputFile) -> Iterator[str]:
    """The names of the first files. A damaged archive ends."""
    num_bytes = 0
    try:
        for member in islice(archive.members(file), MAX_EXAMINED):
            if not (is_metadata(member.name) or _is_hidden(member.name)):
                yield member.name
            num_bytes += member.size
            if member.is_sequential and num_bytes > _MAX_EXAMINED_BYTES:
                return
    except ArchiveError:
        if not num_bytes:
            raise


def _layout_of_names(
    names: list[str], text_extensions: list[str], *, is_packed_folder: bool
) -> ArchiveLayout:
    keyed = groupby(map(split_name, names), key=lambda pair: pair[0])
    samples = [(key, frozenset(extension for _, extension in pairs)) for key, pairs in keyed]
    sets = Counter(extensions for _, extensions in samples if len(extensions) > 1)
    num_equal = max(sets.values(), default=0)
    if num_equal > 1 and 2 * num_equal >= len(samples):
        reason = "its files form samples with the same extensions (--format text reads a folder)"
        return ArchiveLayout(is_samples=True, reason=reason)
    has_text = [not extensions.isdisjoint(text_extensions) for _, extensions in samples]
    if not is_packed_folder and 2 * sum(has_text) >= len(samples):
        reason = "its files are samples with a text (--format text reads a folder)"
        return ArchiveLayout(is_samples=True, reason=reason)
    reason = "its files form no samples of a WebDataset (--format tar reads samples)"
    return ArchiveLayout(is_samples=False, reason=reason)


def files_of_archive(
    file: InputFile, choose: Callable[[InputFile], InputFile | None]
) -> list[InputFile]:
    """The files of an archive, sorted as in the folder that unpacking would give.

    `choose` gets every file in the order of the archive, while it can be opened, and returns it
    with its kind, or None to ignore it. Raises DataError for an archive that cannot be read, or has
    members that cannot.
    """
    files: list[InputFile] = []
    tops: set[str] = set()
    try:
        for member in _opened(file).members(file):
            if _is_hidden(member.name):
                continue
            top, slash, _ = member.name.partition("/")
            tops.add(top + slash if slash else "")
            if suffix_of(member.name).name in ANY_ARCHIVE:
                raise ArchiveError(f"it holds the archive {printable(member.name)[:200]}")
            inner = InputFile(
                path=file.path,
                name=name_in_utf8(member.name),
                kind="",
                compression=suffix_of(member.name).compression,
                size=member.stored,
                mark=file.mark,
                member=member,
            )
            if chosen := choose(inner):
                files.append(chosen)
            if len(files) > MAX_MEMBERS:
                raise ArchiveError(f"it has more than {MAX_MEMBERS:,} files")
        _require_distinct(files)
    except ArchiveError as error:
        raise DataError(f"{shown(file.path)}: {error}. {error.advice}") from error
    except OSError as error:
        advice = "Check the server and the network." if is_transient(error) else DAMAGED
        reason = reject_reason(error).removesuffix(".")
        raise DataError(f"{shown(file.path)}: {reason}. {advice}") from error
    only_top = name_in_utf8(tops.pop()) if len(tops) == 1 else ""
    named = [replace(each, name=each.name.removeprefix(only_top)) for each in files]
    return sorted(named, key=lambda each: os.fsencode(each.name))


def split_archive(address: str) -> tuple[str, str]:
    """The archive and the address inside it, of ARCHIVE/ADDRESS; otherwise the address and ""."""
    local = local_path(address)
    if local is None or os.path.lexists(local):
        return address, ""
    for match in re.finditer("/", local):
        if archive_kind(local[: match.start()]) and Path(local[: match.start()]).is_file():
            return local[: match.start()], local[match.end() :].strip("/")
    return address, ""


def select_files(files: list[InputFile], inner: str, address: str) -> list[InputFile]:
    """The files of an archive at an address inside it: a file, a folder or a pattern."""
    if not inner:
        return files
    if is_pattern(inner):
        root, pattern = split_pattern(inner)
        prefix = "" if root == "." else f"{root}/"
        chosen = [
            replace(file, name=file.name.removeprefix(prefix))
            for file in files
            if file.name.startswith(prefix) and pattern.fullmatch(file.name.removeprefix(prefix))
        ]
    else:
        chosen = [replace(f, name=PurePosixPath(inner).name) for f in files if f.name == inner]
        chosen += [
            replace(file, name=file.name.removeprefix(f"{inner}/"))
            for file in files
            if file.name.startswith(f"{inner}/")
        ]
    if not chosen:
        names = ", ".join(printable(file.name) for file in files[:5])
        raise DataError(f"{shown(address)}: no such file in the archive. It has: {names}")
    return chosen


def _opened(file: InputFile) -> Archive:
    kind = archive_kind(file.name)
    assert kind
    return open_archive(file.path, file.mark, kind, file.compression)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or "/." in name


def _require_distinct(files: list[InputFile]) -> None:
    counts = Counter(file.name for file in files)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise ArchiveError(f"its member {printable(repeated[0])[:200]} occurs twice")
