"""Find the input files of paths, folders, patterns and URLs, in a fixed order.

Braces in an address are expanded first; then *, ? and [] match files. `names.py` leaves out what
describes a corpus and makes the names distinct, `kinds.py` decides the kind of each file.
"""

import fnmatch
import glob
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from braceexpand import braceexpand

from data_pipeline.errors import ConfigError, DataError, printable
from data_pipeline.readers.formats import FORMATS, Format, InputFile, Kind, suffixes_of
from data_pipeline.readers.ids import IdRules
from data_pipeline.readers.kinds import (
    holds_json_lines,
    kind_of,
    require_json_lines,
    suffix_of,
    with_ids,
    without_indexes,
)
from data_pipeline.readers.names import (
    name_in_utf8,
    only_data_files,
    parse_input,
    reject_ambiguous_names,
    require_all_named,
    with_distinct_names,
    with_joined_shards,
    with_splits_of_names,
)
from data_pipeline.system.sources import (
    file_system,
    local_path,
    reject_reason,
    retry_request,
    scheme_of,
    shown,
)

_NOT_TEXT = {
    *(".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".ico", ".tif", ".tiff"),
    *(".mp3", ".ogg", ".wav", ".flac", ".mp4", ".mkv", ".avi", ".webm", ".mov"),
    *(".ttf", ".otf", ".woff", ".woff2", ".pyc", ".so", ".o", ".a", ".exe", ".dll"),
}
"""Suffixes of binary files: ignored in folders, and counted. All other files must be UTF-8."""
_ARCHIVES = {".tar", ".zip", ".7z", ".rar", ".bz2", ".xz", ".lz4"}
"""Ignored in folders, refused when given by name; except .tar if it is read as WebDataset."""
_MAX_EXPANDED = 100_000
"""Maximum number of addresses of one brace pattern."""


@dataclass(frozen=True, slots=True)
class InputFiles:
    """The files in reading order, each with its kind, and the ignored files."""

    files: list[InputFile]
    ignored: Counter[str]
    """Number of ignored files by suffix; of those that describe a corpus, by name."""
    are_named: bool = False
    """Whether the inputs were given as NAME=ADDRESS, which decides the split of every file."""

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
    exclude: Path
    ids: IdRules | None
    text_key: str
    is_wikitext: bool
    ignored: Counter[str] = field(default_factory=Counter)


def find_files(
    inputs: list[str],
    *,
    format: Format,
    exclude: Path,
    ids: IdRules | None = None,
    text_key: str = "text",
    is_wikitext: bool = False,
) -> InputFiles:
    """The files to read: all inputs in order, the files of each sorted by path, no hidden files.

    An input is an address, or NAME=ADDRESS with the split of its files. Otherwise the files have
    the splits that their names give (`names.py`).

    The name of a file is relative to its input. If files of several inputs then have the same name,
    all names are relative to the deepest folder that contains all files. `ids` is given if and only
    if the format is "ids".

    Folders are walked recursively, through links but never twice into the same folder, and not into
    `exclude` (the output). Patterns select from the same files; `**` matches folders of any depth.
    Braces are expanded first, as by a shell, also in URLs.
    Raises DataError for a missing input, an input without text, JSON that is not JSON lines, two
    files with the same name, and a file with the name of a document in another file; ConfigError
    for a URL of an unsupported scheme.
    """
    search = _Search(format, exclude, ids, text_key, is_wikitext)
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
    return InputFiles(files, search.ignored, are_named)


def _files_of(address: str, search: _Search) -> list[InputFile]:
    """The files of one input, each with its kind."""
    if search.format == "ids" and address.endswith(".idx"):  # read together with the .bin file
        address = address.removesuffix(".idx") + ".bin"
    files, is_file = _list_files(address, search.exclude)
    if search.format == "ids":
        files = without_indexes(files)
    in_folder = not is_file and not is_pattern(address)
    if is_file:
        _reject_archive(files[0], search.format)
    else:
        files = only_data_files(files, search.ignored)
        files = [file for file in files if not _is_ignored(file, search, in_folder=in_folder)]
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
    return [_with_kind(file, search, in_folder=in_folder) for file in files]


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
    binary = _NOT_TEXT | _ARCHIVES
    if format == "auto" and not in_folder:
        binary = binary - set(FORMATS["tar"].suffixes)
    if format not in ("auto", "parquet"):
        binary = binary | set(FORMATS["parquet"].suffixes)
    skip = suffix.name not in wanted if wanted else suffix.name in binary
    if skip and format == "jsonl" and suffix.name not in binary:
        skip = not holds_json_lines(file.path, suffix.compression, search.text_key)
    search.ignored[str(suffix)] += skip
    return skip


def _list_ignored(ignored: Counter[str]) -> str:
    counts = ", ".join(f"{count} {printable(name)}" for name, count in (+ignored).items())
    return f" (ignored: {counts})" if counts else ""


def _reject_archive(file: InputFile, format: Format) -> None:
    suffix = suffix_of(file.name).name
    is_read = suffix in FORMATS["tar"].suffixes and format in ("auto", "tar", "ids")
    if suffix in _ARCHIVES and not is_read:
        raise ConfigError(
            f"{shown(file.path)}: {suffix} files are not unpacked here. Unpack it and give the "
            "folder; .gz and .zst files are decompressed."
        )


def expand_braces(address: str) -> list[str]:
    """The addresses of shard-{000..127}.tar or {a,b}/*.txt, in the order in which a shell expands.

    A file of this name, and braces that a shell would not expand, stay as they are.
    """
    if not address:
        raise ConfigError(
            "an input is empty, perhaps a variable of the shell that is not set. Give a file, "
            "folder, pattern or URL; . is the current folder."
        )
    local = local_path(address)
    if "{" not in address or (local and Path(local).exists()):
        return [address]
    ranges = re.findall(r"\{(-?\d+)\.\.(-?\d+)", address)
    expanded = []
    try:
        size = math.prod(abs(int(stop) - int(start)) + 1 for start, stop in ranges)
        if size <= _MAX_EXPANDED:  # braceexpand holds every range in memory
            expanded = list(islice(braceexpand(address, escape=False), _MAX_EXPANDED + 1))
    except ValueError:  # the braces are not balanced
        return [address]
    if not 0 < len(expanded) <= _MAX_EXPANDED:
        raise ConfigError(
            f"{shown(address)}: the braces expand to more than {_MAX_EXPANDED:,} inputs. Give the "
            "folder, or a pattern with * that matches the files that exist."
        )
    return expanded


def is_pattern(address: str) -> bool:
    return glob.has_magic(address.partition("://")[2] or address)


def split_pattern(address: str) -> tuple[str, re.Pattern[str]]:
    """The folder before the first wildcard, and a regular expression for names relative to it."""
    parts = address.split("/")
    num_fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    regexes = []
    for part in parts[num_fixed:]:
        # `**` matches any number of folders, `*` no slash. Names have no empty parts.
        translated = fnmatch.translate(part).removeprefix("(?s:").removesuffix(r")\Z")
        regexes.append("(?:[^/]+/)*" if part == "**" else translated.replace(".*", "[^/]*") + "/")
    if parts[-1] == "**":
        regexes.append("[^/]+/")
    root = "/".join(parts[:num_fixed]) or ("/" if address.startswith("/") else ".")
    return root, re.compile("".join(regexes).removesuffix("/"), re.DOTALL)
