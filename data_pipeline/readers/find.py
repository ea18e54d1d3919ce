"""Find the input files of paths, folders, patterns, archives and URLs, in a fixed order.

Braces in an address are expanded first; then *, ? and [] match files. `names.py` does both, leaves
out what describes a corpus and makes the names distinct, `kinds.py` decides the kind of each
file, `unpack.py` unpacks archives.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from data_pipeline.errors import ConfigError, DataError, printable
from data_pipeline.readers.formats import FORMATS, Format, InputFile, Kind, suffixes_of
from data_pipeline.readers.ids import IdRules
from data_pipeline.readers.kinds import (
    holds_json_lines,
    kind_of,
    require_json_lines,
    with_ids,
    without_indexes,
)
from data_pipeline.readers.names import (
    expand_braces,
    is_pattern,
    name_in_utf8,
    only_data_files,
    parse_input,
    reject_ambiguous_names,
    require_all_named,
    split_pattern,
    with_distinct_names,
    with_joined_shards,
    with_splits_of_names,
)
from data_pipeline.readers.suffixes import ANY_ARCHIVE, ARCHIVES, NOT_TEXT, suffix_of
from data_pipeline.readers.unpack import (
    UNPACKED,
    ArchiveLayout,
    is_archive,
    layout_of_tar,
    split_archive,
    unpack,
)
from data_pipeline.system.sources import (
    file_system,
    local_path,
    reject_reason,
    retry_request,
    scheme_of,
    shown,
)


@dataclass(frozen=True, slots=True)
class InputFiles:
    """The files in reading order, each with its kind, and the ignored files."""

    files: list[InputFile]
    ignored: Counter[str]
    """Number of ignored files by suffix; of those that describe a corpus, by name."""
    are_named: bool = False
    """Whether the inputs were given as NAME=ADDRESS, which decides the split of every file."""
    notes: tuple[str, ...] = ()
    """How archives are read, for the user."""

    @property
    def kinds(self) -> Counter[Kind]:
        return Counter(file.kind for file in self.files)

    @property
    def read_as(self) -> dict[Kind, dict[str, int]]:
        """Number of files by kind and suffix."""
        counts: Counter[tuple[Kind, str]] = Counter()
        for file in self.files:
            counts[file.kind, str(suffix_of(file.name))] += 1 + len(file.next_paths)
        return {
            kind: {suffix: n for (each, suffix), n in sorted(counts.items()) if each == kind}
            for kind in sorted(self.kinds)
        }


@dataclass(frozen=True, slots=True)
class _Search:
    """The arguments of `find_files`, and the files that it ignores."""

    format: Format
    out: Path
    ids: IdRules | None
    text_key: str
    is_wikitext: bool
    ignored: Counter[str] = field(default_factory=Counter)
    unpacked: dict[str, Path] = field(default_factory=dict)
    """The folder to which every archive was unpacked, by its path."""
    layouts: dict[str, ArchiveLayout] = field(default_factory=dict)
    """How every archive is read, by its path."""


def find_files(
    inputs: list[str],
    *,
    format: Format,
    out: Path,
    ids: IdRules | None = None,
    text_key: str = "text",
    is_wikitext: bool = False,
) -> InputFiles:
    """The files to read: all inputs in order, the files of each sorted by path, no hidden files.

    An input is an address, or NAME=ADDRESS with the split of its files. Otherwise the files have
    the splits that their names give (`names.py`). An archive that is given by name or pattern is
    unpacked in `out` / UNPACKED, where the files must stay until they are read, and
    ARCHIVE/ADDRESS selects files in it.

    The name of a file is relative to its input. If files of several inputs then have the same name,
    all names are relative to the deepest folder that contains all files. `ids` is given if and only
    if the format is "ids".

    Folders are walked recursively, through links but never twice into the same folder, and not into
    `out`, the directory of the dataset. Patterns select from the same files; `**` matches folders
    of any depth. Braces are expanded first, as by a shell, also in URLs.
    Raises DataError for a missing input, an input without text, JSON that is not JSON lines, and
    two files with the same name; ConfigError for a URL of an unsupported scheme.
    """
    search = _Search(format, out, ids, text_key, is_wikitext)
    named = [parse_input(each) for each in inputs]
    require_all_named([split for split, _ in named], inputs)
    pairs = [(split, each) for split, address in named for each in expand_braces(address)]
    are_named = any(split for split, _ in named)
    try:
        by_input = [_files_of(address, search) for _, address in pairs]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}.") from error
    if are_named:
        splits = (split for split, _ in pairs)
        files = [
            replace(f, split=s) for s, each in zip(splits, by_input, strict=True) for f in each
        ]
    else:
        files = with_splits_of_names(by_input)
    files = with_distinct_names(with_joined_shards(files))
    reject_ambiguous_names(files)
    require_json_lines(files)
    return InputFiles(files, search.ignored, are_named, _notes_of(search))


def _files_of(address: str, search: _Search) -> list[InputFile]:
    """The files of one input, each with its kind."""
    if search.format == "ids" and address.endswith(".idx"):  # read together with the .bin file
        address = address.removesuffix(".idx") + ".bin"
    archive, inner = split_archive(address)
    files, is_file = _list_files(archive, search.out)
    if search.format == "ids":
        files = without_indexes(files)
    in_folder = not is_file and not is_pattern(address)
    if is_file:
        _reject_archive(files[0], search.format)
    else:
        files = _data_files(files, search, in_folder=in_folder)
    if not files:
        place = "matches this" if is_pattern(address) else "in this folder"
        tar = " --format tar reads .tar files in folders." * any(
            ".tar" in suffix for suffix in search.ignored
        )
        raise DataError(
            f"{shown(address)}: no text {place}{_list_ignored(search.ignored)}.{tar} Give a folder "
            "or pattern with text, .jsonl or .parquet files; a pattern matches files, ** matches "
            "folders of any depth."
        )
    read: list[InputFile] = []
    for file in files:
        if not in_folder and is_archive(file.name) and not _holds_samples(file, search, inner):
            read += _files_in_archive(file, inner, search)
        elif inner:
            raise ConfigError(
                f"{shown(address)}: --format tar reads all samples of an archive. Give "
                f"{shown(archive)}, or omit the format."
            )
        else:
            read.append(_with_kind(file, search, in_folder=in_folder))
    return read


def _data_files(files: list[InputFile], search: _Search, *, in_folder: bool) -> list[InputFile]:
    """The files of a folder or pattern without those that are ignored, which it counts."""
    files = only_data_files(files, search.ignored)
    return [file for file in files if not _is_ignored(file, search, in_folder=in_folder)]


def _holds_samples(file: InputFile, search: _Search, inner: str) -> bool:
    """Whether an archive is read as a WebDataset, not as a folder."""
    if file.path not in search.layouts:
        if search.format not in ("auto", "ids") or suffix_of(file.name).name == ".zip" or inner:
            # An address inside an archive means a folder.
            layout = ArchiveLayout(is_samples=search.format == "tar", reason="")
        else:
            layout = layout_of_tar(file, search.text_key, is_ids=search.ids is not None)
        search.layouts[file.path] = layout
    return search.layouts[file.path].is_samples


def _files_in_archive(archive: InputFile, inner: str, search: _Search) -> list[InputFile]:
    """The files of an archive, or those at an address inside it, each with its kind."""
    unpack_in = (search.out / UNPACKED).absolute()  # workers may have another current folder
    if archive.path not in search.unpacked:
        folder = unpack_in / str(len(search.unpacked))
        search.unpacked[archive.path] = unpack(archive, folder)
    root = search.unpacked[archive.path]
    names = _walk(root, search.out)
    if is_pattern(inner):
        top, pattern = split_pattern(inner)
        prefix = "" if top == "." else f"{top}/"
        chosen = [n for n in names if n.startswith(prefix) and pattern.fullmatch(n[len(prefix) :])]
    elif inner in names:
        prefix, chosen = inner[: inner.rfind("/") + 1], [inner]
    else:
        prefix = inner and f"{inner}/"
        chosen = [name for name in names if name.startswith(prefix)]
    if inner and not chosen:
        address, listed = f"{archive.path}/{inner}", ", ".join(map(printable, names[:5]))
        raise DataError(f"{shown(address)}: no such file in the archive. It has: {listed}")
    files = []
    for name in chosen:
        file = _local_file(root / prefix, name[len(prefix) :])
        member = os.path.relpath(file.path, unpack_in).partition("/")[2]
        files.append(replace(file, mark=archive.mark, archive=archive.path, member=member))
    if search.format == "ids":
        files = without_indexes(files)
    files = _data_files(files, search, in_folder=True)
    if not files:
        raise DataError(
            f"{shown(archive.path)}: no text in this archive{_list_ignored(search.ignored)}. Give "
            "an archive with text or .jsonl files."
        )
    # The only file of an archive is read as one that is given by name.
    return [_with_kind(file, search, in_folder=len(names) > 1) for file in files]


def _notes_of(search: _Search) -> tuple[str, ...]:
    """How archives are read, equal ones together."""
    paths: dict[tuple[bool, str], list[str]] = {}
    for path, layout in search.layouts.items():
        if layout.reason or not layout.is_samples:
            paths.setdefault((layout.is_samples, layout.reason), []).append(path)
    notes = []
    for (is_samples, reason), same in paths.items():
        more = f" and {len(same) - 1:,} more" if len(same) > 1 else ""
        kind = "samples of a WebDataset" if is_samples else "the folder to which it unpacks"
        notes.append(f"{shown(same[0])}{more}: read as {kind}{reason and f': {reason}'}")
    return tuple(notes)


def _with_kind(file: InputFile, search: _Search, *, in_folder: bool) -> InputFile:
    kind = kind_of(
        file,
        search.format,
        in_folder=in_folder,
        text_key=search.text_key,
        is_wikitext=search.is_wikitext,
    )
    file = replace(file, kind=kind, keeps_nul=search.format == "text")
    return with_ids(file, search.ids) if search.ids else file


def _list_files(address: str, exclude: Path) -> tuple[list[InputFile], bool]:
    """The files of an input in order, and whether the input is a single file."""
    local = local_path(address)
    if local is None:
        return _list_url(address)
    path = Path(local)
    if path.is_dir():
        return [_local_file(path, name) for name in _walk(path, exclude)], False
    if path.exists():
        return [_local_file(path.parent, path.name)], True
    if is_pattern(local):
        root, pattern = split_pattern(local)
        walked = _walk(Path(root), exclude) if Path(root).is_dir() else []
        return [_local_file(Path(root), name) for name in walked if pattern.fullmatch(name)], False
    cause = "a broken link" if path.is_symlink() else "no such file or folder"
    raise DataError(f"{shown(address)}: {cause}. Check the spelling and the current directory.")


def _list_url(url: str) -> tuple[list[InputFile], bool]:
    system, scheme = file_system(url), scheme_of(url)
    try:
        if scheme in ("http", "https"):  # a web server lists no folders, and "?" starts a query
            name = PurePosixPath(url.partition("?")[0].partition("://")[2]).name or "index"
            return [_remote_file(url, name, retry_request(lambda: system.info(url)))], True
        root, pattern = split_pattern(url) if is_pattern(url) else (url, None)
        bare = str(system._strip_protocol(root)).rstrip("/")
        if not pattern:
            info = retry_request(lambda: system.info(bare))
            if info["type"] == "file":
                return [_remote_file(url, PurePosixPath(bare).name, info)], True
        listed = retry_request(lambda: system.find(bare, detail=True))
    except OSError as error:
        raise DataError(
            f"{shown(url)}: {reject_reason(error)}. Check the address and permissions."
        ) from error
    files = []
    for path, info in listed.items():
        name = path.removeprefix(bare).lstrip("/")
        is_file = info["type"] == "file" and not path.endswith("/")
        is_hidden = re.search(r"(^|/)\.", name)
        if is_file and not is_hidden and (not pattern or pattern.fullmatch(name)):
            files.append(_remote_file(f"{scheme}://{path}", name, info))
    return sorted(files, key=lambda file: os.fsencode(file.name)), False


def _remote_file(url: str, name: str, info: Mapping[str, Any]) -> InputFile:
    known = ("etag", "last-modified", "lastmodified", "updated", "mtime")
    mark = " ".join(str(info[key]) for key in sorted(info) if key.lower() in known)
    size = int(info.get("size") or 0)
    return InputFile(url, name_in_utf8(name), "", suffix_of(name).compression, size, mark)


def _local_file(root: Path, name: str) -> InputFile:
    """The file `name` below the folder `root`."""
    path = os.path.join(root, name) if str(root) != "." else name  # noqa: PTH118 - 20 times faster
    try:
        status = os.stat(path)  # noqa: PTH116
        size, mark = status.st_size, str(status.st_mtime_ns)
    except OSError:  # the reader reports the error
        size, mark = 0, ""
    return InputFile(path, name_in_utf8(name), "", suffix_of(name).compression, size, mark)


def _walk(folder: Path, exclude: Path) -> list[str]:
    """The relative paths of all visible files below `folder`, sorted by their bytes."""
    visited = {_identity(exclude)}
    names: list[str] = []
    pending = [""]
    while pending:
        # If two links lead to one folder, the first in sorted order is used: ids stay the same.
        below = pending.pop(0)
        identity = _identity(folder / below)
        if identity and identity in visited:
            continue
        visited.add(identity)
        with os.scandir(folder / below) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
        for entry in sorted(visible, key=lambda entry: os.fsencode(entry.name)):
            name = f"{below}/{entry.name}" if below else entry.name
            (pending if entry.is_dir() else names).append(name)
    return sorted(names, key=os.fsencode)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_ignored(file: InputFile, search: _Search, *, in_folder: bool) -> bool:
    """Whether a file in a folder is ignored; if so, counts it."""
    suffix, format = suffix_of(file.name), search.format
    wanted = () if format == "auto" else suffixes_of(format)
    if format == "ids" and suffix.name == ".npz":  # refused, not ignored
        return False
    if not in_folder and suffix.name in ARCHIVES and (suffix.name == ".tar" or format != "tar"):
        return False
    binary = NOT_TEXT | ANY_ARCHIVE
    if format not in ("auto", "parquet"):
        binary = binary | set(FORMATS["parquet"].suffixes)
    skip = suffix.name not in wanted if wanted else suffix.name in binary
    if skip and format == "jsonl" and suffix.name not in binary:
        skip = not holds_json_lines(file, search.text_key)
    search.ignored[str(suffix)] += skip
    return skip


def _list_ignored(ignored: Counter[str]) -> str:
    counts = ", ".join(f"{count} {printable(name)}" for name, count in (+ignored).items())
    return f" (ignored: {counts})" if counts else ""


def _reject_archive(file: InputFile, format: Format) -> None:
    suffix = suffix_of(file.name).name
    if suffix in ANY_ARCHIVE and suffix not in ARCHIVES:
        raise ConfigError(
            f"{shown(file.path)}: {suffix} files are not unpacked here. Unpack it and give the "
            "folder; .zip and .tar archives are read, .gz, .zst, .bz2 and .xz files decompressed."
        )
    if format == "tar" and suffix == ".zip":
        raise ConfigError(
            f"{shown(file.path)}: --format tar reads the samples of .tar files. Omit it."
        )
