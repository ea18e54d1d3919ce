"""The rules of ids of each input file: how arrays store them, known before they are read."""

import contextlib
import os
from dataclasses import replace
from typing import Protocol, TypeVar

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.readers.formats import InputFile
from data_pipeline.readers.token_ids import IdRules
from data_pipeline.system.sources import (
    Compression,
    file_system,
    open_source,
    retry_request,
    scheme_of,
    shown,
)


class _Entry(Protocol):
    @property
    def path(self) -> str: ...


E = TypeVar("E", bound=_Entry)


NPY_MAGIC = b"\x93NUMPY"
SHARD_MAGICS = {20240520: (1, "<u2"), 20240801: (7, "<u4"), 20240522: (0, "")}
"""First int32 of the files of llm.c: version and type of the ids, for files that hold a stream."""
_INDEX_SUFFIXES = {".bin": ".idx", ".npy": ".csv.gz"}
"""Suffix of a file of ids, and of the file with the bounds of its documents (`indexed_ids.py`)."""


def index_path(path: str) -> str:
    """The path or URL of the index that belongs to a file of ids; "" for files that have none."""
    for suffix, index_suffix in _INDEX_SUFFIXES.items():
        if path.endswith(suffix):
            return path.removesuffix(suffix) + index_suffix
    return ""


def has_index(path: str) -> bool:
    """Whether the file at `path` and an index are a pair."""
    other = index_path(path)
    if not other:
        return False
    if not scheme_of(path):
        return os.path.exists(other)  # noqa: PTH110 - as the other checks of listed files
    system = file_system(other)
    return bool(retry_request(lambda: system.exists(other)))


def without_indexes(entries: list[E]) -> list[E]:
    """Drop the indexes of pairs. Raises DataError for an .idx file without its .bin file."""
    paths = {entry.path for entry in entries}
    indexes = {index_path(path) for path in paths}
    for entry in entries:
        pair = entry.path.removesuffix(".idx") + ".bin"
        if entry.path.endswith(".idx") and pair not in paths:
            raise DataError(
                f"{shown(entry.path)} is an index without its {shown(pair)}. Copy that, too, or "
                "remove the index from the input."
            )
    return [entry for entry in entries if entry.path not in indexes]


def first_bytes(path: str, compression: Compression, size: int) -> bytes:
    """The first `size` decompressed bytes of a file; fewer if it is shorter or cannot be read."""
    with contextlib.suppress(OSError), open_source(path, compression) as stream:
        return stream.read(size)
    return b""  # the reader reports the error


def with_ids(file: InputFile, rules: IdRules) -> InputFile:
    """`file` with the rules for its ids. Raises ConfigError for a raw file without --dtype."""
    from data_pipeline.readers.id_arrays import shard_dtype, stored_dtype
    from data_pipeline.readers.indexed_ids import index_dtype

    dtype, mark = "", file.mark
    is_plain = not file.compression and not scheme_of(file.path)
    if file.kind in ("bin", "olmo"):
        dtype = rules.dtype
        if not dtype:
            reason = "has no header" if file.kind == "olmo" else "has no header and no .idx file"
            raise ConfigError(
                f"{shown(file.path)} {reason}, so it is read as raw integers, whose type "
                "is not in the file. Give it: --dtype uint16 (or uint32, int32, ...)"
            )
    elif is_plain:
        read_dtype = {"npy": stored_dtype, "llm.c": shard_dtype, "megatron": index_dtype}
        dtype = read_dtype[file.kind](file.path) if file.kind in read_dtype else ""
    if file.kind in ("megatron", "olmo") and is_plain:
        status = os.stat(index_path(file.path))  # noqa: PTH116 - as in find.py
        mark = f"{mark} {status.st_size} {status.st_mtime_ns}"
    return replace(file, ids=replace(rules, dtype=dtype), mark=mark)
