"""Finding the input files: paths, folders, patterns and URLs to a list in a fixed order.

What each is read as is decided in `kinds.py`.
"""

import fnmatch
import glob
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from data_pipeline.errors import ConfigError, DataError, printable
from data_pipeline.readers.formats import FORMATS, Format, InputFile, Kind
from data_pipeline.readers.kinds import kind_of, require_json_lines, suffix_of
from data_pipeline.storage.source_errors import SourceError
from data_pipeline.storage.urls import file_system, local_path, retry_request, scheme_of, shown

_NOT_TEXT = {
    *(".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".ico", ".tif", ".tiff"),
    *(".mp3", ".ogg", ".wav", ".flac", ".mp4", ".mkv", ".avi", ".webm", ".mov"),
    *(".ttf", ".otf", ".woff", ".woff2", ".pyc", ".so", ".o", ".a", ".exe", ".dll"),
}
"""Suffixes that are never text: ignored in folders, and counted. All else must be UTF-8."""
_ARCHIVES = {".tar", ".tgz", ".zip", ".7z", ".rar", ".bz2", ".xz", ".lz4"}
"""Not unpacked here: ignored in folders, refused when given by name."""


@dataclass(frozen=True, slots=True)
class InputFiles:
    """The files in reading order, and what was decided by name or by a look inside."""

    files: list[InputFile]
    ignored: Counter[str]
    """Files left out, by suffix."""

    @property
    def kinds(self) -> Counter[Kind]:
        return Counter(file.kind for file in self.files)

    @property
    def read_as(self) -> dict[Kind, dict[str, int]]:
        """Files of every kind and, in it, of every suffix."""
        counts = Counter((file.kind, str(suffix_of(file.name))) for file in self.files)
        return {
            kind: {suffix: n for (each, suffix), n in sorted(counts.items()) if each == kind}
            for kind in sorted(self.kinds)
        }


class _Found(NamedTuple):
    path: str
    """Local path or URL."""
    name: str
    """Relative to the input, `/` between folders."""
    size: int
    mark: str


def find_files(inputs: list[str], *, format: Format, exclude: Path) -> InputFiles:
    """Every file to read, each input's files sorted by path. Hidden files are left out.

    Folders are walked to the end, through links but never twice into the same folder, and not into
    `exclude` (the output); patterns (`**` for folders of any depth) select among the same files.
    Raises DataError for a missing input, a folder without any text, JSON that is not lines, two
    files of the same name, and a file named as a document in another; ConfigError for a URL of a
    scheme that is not read.
    """
    try:
        return _find_files(inputs, format, exclude)
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}.") from error


def _find_files(inputs: list[str], format: Format, exclude: Path) -> InputFiles:
    files: list[InputFile] = []
    ignored: Counter[str] = Counter()
    for given in inputs:
        entries, by_name = _entries(given, exclude)
        if by_name:
            _require_no_archive(entries[0])
        else:
            entries = [found for found in entries if not _is_ignored(found.name, format, ignored)]
        if not entries:
            where = "matches this" if _is_pattern(given) else "in this folder"
            raise DataError(
                f"{shown(given)}: no text {where}"
                f"{_list_ignored(ignored)}. Give a folder or pattern with text, .jsonl or .parquet "
                "files; a pattern matches files, ** goes through folders."
            )
        files += [_input_file(found, format) for found in entries]
    _require_distinct(files)
    require_json_lines(files)
    return InputFiles(files, ignored)


def _entries(given: str, exclude: Path) -> tuple[list[_Found], bool]:
    """The files of an input in order, and whether it names one file."""
    local = local_path(given)
    if local is None:
        return _url_entries(given)
    path = Path(local)
    if path.is_dir():
        return [_local(path, name) for name in _walk(path, exclude)], False
    if path.exists():
        return [_local(path.parent, path.name)], True
    if _is_pattern(local):
        root, pattern = _split_pattern(local)
        walked = _walk(Path(root), exclude) if Path(root).is_dir() else []
        return [_local(Path(root), name) for name in walked if pattern.fullmatch(name)], False
    cause = "a link to nothing" if path.is_symlink() else "no such file or folder"
    raise DataError(f"{shown(given)}: {cause}. Check the spelling; paths are relative to here.")


def _url_entries(url: str) -> tuple[list[_Found], bool]:
    system, scheme = file_system(url), scheme_of(url)
    try:
        if scheme in ("http", "https"):  # a web page is no folder, and ? begins a query
            name = PurePosixPath(url.partition("?")[0].partition("://")[2]).name or "index"
            info = retry_request(lambda: system.info(url))
            return [_Found(url, name, int(info.get("size") or 0), _mark(info))], True
        root, pattern = _split_pattern(url) if _is_pattern(url) else (url, None)
        bare = str(system._strip_protocol(root)).rstrip("/")
        if not pattern:
            info = retry_request(lambda: system.info(bare))
            if info["type"] == "file":
                name = PurePosixPath(bare).name
                return [_Found(url, name, int(info["size"] or 0), _mark(info))], True
        listed = retry_request(lambda: system.find(bare, detail=True))
    except SourceError as error:
        raise DataError(f"{shown(url)}: {error.reason}. Check the address and who may read.") from (
            error
        )
    found = [
        _Found(
            f"{scheme}://{path}",
            path.removeprefix(bare).lstrip("/"),
            int(info["size"] or 0),
            _mark(info),
        )
        for path, info in listed.items()
        if info["type"] == "file" and not path.endswith("/")
    ]
    visible = [entry for entry in found if not re.search(r"(^|/)\.", entry.name)]
    chosen = [entry for entry in visible if not pattern or pattern.fullmatch(entry.name)]
    return sorted(chosen, key=lambda entry: os.fsencode(entry.name)), False


def _mark(info: Mapping[str, Any]) -> str:
    """What a file system says of a file's version: entity tag, time of modification, or nothing."""
    known = ("etag", "last-modified", "lastmodified", "updated", "mtime")
    return " ".join(str(info[key]) for key in sorted(info) if key.lower() in known)


def _is_pattern(given: str) -> bool:
    return glob.has_magic(given.partition("://")[2] or given)


def _split_pattern(given: str) -> tuple[str, re.Pattern[str]]:
    """The folder in front of the first special character, and what names below it must match."""
    parts = given.split("/")
    fixed = next(at for at, part in enumerate(parts) if glob.has_magic(part))
    pieces = []
    for part in parts[fixed:]:
        # Names below a folder have no empty parts; `**` stands for any number of folders.
        translated = fnmatch.translate(part).removeprefix("(?s:").removesuffix(r")\Z")
        pieces.append("(?:[^/]+/)*" if part == "**" else translated.replace(".*", "[^/]*") + "/")
    if parts[-1] == "**":
        pieces.append("[^/]+/")
    root = "/".join(parts[:fixed]) or ("/" if given.startswith("/") else ".")
    return root, re.compile("".join(pieces).removesuffix("/"), re.DOTALL)


def _local(root: Path, name: str) -> _Found:
    """The file `name` below a folder."""
    path = os.path.join(root, name) if str(root) != "." else name  # noqa: PTH118 - 20 times faster
    try:
        status = os.stat(path)  # noqa: PTH116
        size, mark = status.st_size, str(status.st_mtime_ns)
    except OSError:  # reading it will say why
        size, mark = 0, ""
    return _Found(path, name, size, mark)


def _walk(folder: Path, exclude: Path) -> list[str]:
    """Every visible non-folder below `folder`, sorted by the bytes of its relative path."""
    skipped = _identity(exclude)
    visited = {skipped} if skipped else set()
    found: list[str] = []
    pending = [""]
    while pending:
        # Of two links to one folder the first in sorted order wins, so the ids stay the same.
        below = pending.pop(0)
        identity = _identity(folder / below)
        if identity in visited:
            continue
        if identity:
            visited.add(identity)
        with os.scandir(folder / below) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
        for entry in sorted(visible, key=lambda entry: os.fsencode(entry.name)):
            name = f"{below}/{entry.name}" if below else entry.name
            (pending if entry.is_dir() else found).append(name)
    return sorted(found, key=os.fsencode)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _input_file(found: _Found, format: Format) -> InputFile:
    name = os.fsencode(found.name).decode("utf-8", errors="backslashreplace")
    return InputFile(
        path=found.path,
        name=name,
        kind=kind_of(found.path, found.name, format),
        compression=suffix_of(found.name).compression,
        size=found.size,
        mark=found.mark,
    )


def _is_ignored(name: str, format: Format, ignored: Counter[str]) -> bool:
    suffix = suffix_of(name)
    wanted = () if format == "auto" else FORMATS[format].suffixes
    binary = _NOT_TEXT | _ARCHIVES
    if format not in ("auto", "parquet"):
        binary = binary | set(FORMATS["parquet"].suffixes)
    skip = suffix.name not in wanted if wanted else suffix.name in binary
    ignored[str(suffix)] += skip
    return skip


def _list_ignored(ignored: Counter[str]) -> str:
    counts = ", ".join(f"{count} {printable(name)}" for name, count in (+ignored).items())
    return f" (ignored: {counts})" if counts else ""


def _require_no_archive(found: _Found) -> None:
    suffix = suffix_of(found.name).name
    if suffix in _ARCHIVES:
        raise ConfigError(
            f"{shown(found.path)}: {suffix} files are not unpacked here. Unpack it and give the "
            "folder; of compressed files .gz and .zst are read."
        )


def _require_distinct(files: list[InputFile]) -> None:
    by_name: dict[str, InputFile] = {}
    by_path: set[str] = set()
    for file in files:
        path = file.path if scheme_of(file.path) else os.path.abspath(file.path)  # noqa: PTH100
        if path in by_path:
            raise DataError(f"{shown(file.path)} would be read twice. Give every file once.")
        by_path.add(path)
        if file.name in by_name:
            raise DataError(
                f"{shown(by_name[file.name].path)} and {shown(file.path)} would both be document "
                f"{printable(file.name)!r}. Give a folder that contains both, or rename one."
            )
        by_name[file.name] = file
    for name, file in by_name.items():
        other = by_name.get(re.sub(r":[1-9][0-9]*\Z", "", name), file)
        if other is not file and other.kind != "text":  # whose ids have no lines
            raise DataError(
                f"{shown(file.path)} has the name of a document in {shown(other.path)}, "
                f"{printable(name)!r}. Rename one."
            )
