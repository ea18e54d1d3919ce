"""The addresses of inputs: SPLIT=ADDRESS, braces, wildcards, ARCHIVE/ADDRESS, and the files there.

Braces are expanded first, as by a shell; then *, ? and [] match files, and ** folders of any depth.
Files are listed in the order of the bytes of their paths, without hidden ones.
"""

import glob
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from braceexpand import braceexpand
from fsspec.utils import glob_translate

from data_pipeline.errors import ConfigError, DataError, printable
from data_pipeline.readers.source import ARCHIVES, InputFile, mark_of, suffix_of
from data_pipeline.readers.split_names import SPLIT_PATTERN, TRAIN
from data_pipeline.system.sources import (
    file_system,
    local_path,
    reject_reason,
    retry_request,
    scheme_of,
    shown,
)


def parse_input(argument: str) -> tuple[str, str]:
    """(split, address) of NAME=ADDRESS; the split is "" for an address alone.

    The argument is an address if there is a file with its whole path, or if NAME is part of a path,
    URL or pattern. Raises ConfigError if NAME cannot be the name of a split.
    """
    name, _, address = argument.partition("=")
    if not address or re.search(r"[/:*?\[{]", name) or os.path.lexists(argument):
        return "", argument
    if not re.fullmatch(SPLIT_PATTERN, name):
        raise ConfigError(
            f"{printable(argument)}: {printable(name)!r} cannot be the name of a split: lower-case "
            "letters, digits and _ after a letter, at most 32. Write valid="
            f"{printable(address)}; or, if = is part of a file's name, ./{printable(argument)}"
        )
    return name, address


def require_all_named(splits: Sequence[str], arguments: Sequence[str]) -> None:
    """Raise ConfigError if only some inputs are NAME=ADDRESS, or if none is named train."""
    if not any(splits):
        return
    if "" in splits:
        unnamed = printable(arguments[list(splits).index("")])
        raise ConfigError(
            f"{unnamed}: this input has no split and others have one. Name the split of every "
            f"input: train={unnamed}"
        )
    if TRAIN not in splits:
        raise ConfigError(
            f"the inputs are {', '.join(sorted(set(splits)))}, and none is train. Give the text to "
            "train on as train=PATH"
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
    try:
        return list(braceexpand(address, escape=False))
    except ValueError:  # the braces are not balanced
        return [address]


def is_pattern(address: str) -> bool:
    return glob.has_magic(address.partition("://")[2] or address)


def split_pattern(address: str) -> tuple[str, re.Pattern[str]]:
    """The folder before the first wildcard, and a regular expression for names relative to it."""
    parts = address.split("/")
    num_fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    root = "/".join(parts[:num_fixed]) or ("/" if address.startswith("/") else ".")
    try:
        return root, re.compile(glob_translate("/".join(parts[num_fixed:])))
    except ValueError as error:  # a**
        raise ConfigError(f"{shown(address)}: {error}. Write **/NAME.") from error


def split_archive(address: str) -> tuple[str, str]:
    """The archive and the address inside it, of ARCHIVE/ADDRESS; otherwise the address and ""."""
    local = local_path(address)
    if local is None or os.path.lexists(local):
        return address, ""
    for match in re.finditer("/", local):
        archive = local[: match.start()]
        if suffix_of(archive).name in ARCHIVES and Path(archive).is_file():
            return archive, local[match.end() :].strip("/")
    return address, ""


# --- the files at an address ----------------------------------------------------------------------


def list_files(address: str, out: Path) -> tuple[list[InputFile], bool]:
    """The files of an input in order, and whether the input is a single file.

    Folders are walked through links, but not into `out`. Raises DataError for a missing input.
    """
    local = local_path(address)
    if local is None:
        return _list_url(address)
    listed = list_local(Path(), local, out)
    if not listed:
        cause = "a broken link" if os.path.lexists(local) else "no such file or folder"
        raise DataError(f"{shown(address)}: {cause}. Check the spelling and the current directory.")
    return listed


def list_local(root: Path, address: str, out: Path) -> tuple[list[InputFile], bool] | None:
    """As `list_files`, of an address below the folder `root`; None if it is missing."""
    path = root / address
    if path.is_dir():
        return [local_file(path, name) for name in walk(path, out)], False
    if path.exists():
        return [local_file(path.parent, path.name)], True
    if not is_pattern(address):
        return None
    top, pattern = split_pattern(address)
    walked = walk(root / top, out) if (root / top).is_dir() else []
    return [local_file(root / top, name) for name in walked if pattern.fullmatch(name)], False


def local_file(root: Path, name: str) -> InputFile:
    path = os.path.join(root, name) if str(root) != "." else name  # noqa: PTH118 - 20 times faster
    try:
        size, mark = os.stat(path).st_size, mark_of(path)  # noqa: PTH116
    except OSError:  # the reader reports the error
        size, mark = 0, ""
    return InputFile(path, name_in_utf8(name), size, mark)


def walk(folder: Path, out: Path) -> list[str]:
    """The relative paths of all visible files below `folder`, sorted by their bytes."""
    visited = {os.path.realpath(out)}
    names: list[str] = []

    def fail(error: OSError) -> None:
        raise error

    for root, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        # If two links lead to one folder, the first in sorted order is used: ids stay the same.
        folders.sort(key=os.fsencode)
        if (real_path := os.path.realpath(root)) in visited:
            folders.clear()
            continue
        visited.add(real_path)
        folders[:] = (name for name in folders if name[0] != ".")
        below = os.path.relpath(root, folder) + "/"
        names += (f"{below}{name}".removeprefix("./") for name in files if name[0] != ".")
    return sorted(names, key=os.fsencode)


def name_in_utf8(name: str) -> str:
    return os.fsencode(name).decode("utf-8", errors="backslashreplace")


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
    return InputFile(url, name_in_utf8(name), int(info.get("size") or 0), mark)
