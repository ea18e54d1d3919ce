"""The rules of ids of each input file: how arrays store them, known before they are read."""

import os
from dataclasses import replace
from typing import Protocol, TypeVar

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.readers.formats import InputFile
from data_pipeline.readers.token_ids import IdRules
from data_pipeline.storage.urls import file_system, retry_request, scheme_of, shown


class _Entry(Protocol):
    @property
    def path(self) -> str: ...


E = TypeVar("E", bound=_Entry)


def index_path(path: str) -> str:
    """The path or URL of the .idx file that belongs to a .bin file."""
    return path.removesuffix(".bin") + ".idx"


def has_index(path: str) -> bool:
    """Whether the file at `path` is the .bin file of a pair."""
    other = index_path(path)
    if not path.endswith(".bin"):
        return False
    if not scheme_of(path):
        return os.path.exists(other)  # noqa: PTH110 - as the other checks of listed files
    system = file_system(other)
    return bool(retry_request(lambda: system.exists(other)))


def without_indexes(entries: list[E]) -> list[E]:
    """Drop the .idx files of pairs. Raises DataError for one without its .bin file."""
    paths = {entry.path for entry in entries}
    for entry in entries:
        pair = entry.path.removesuffix(".idx") + ".bin"
        if entry.path.endswith(".idx") and pair not in paths:
            raise DataError(
                f"{shown(entry.path)} is an index without its {shown(pair)}. Copy that, too, or "
                "remove the index from the input."
            )
    return [entry for entry in entries if not entry.path.endswith(".idx")]


def with_ids(file: InputFile, rules: IdRules) -> InputFile:
    """`file` with the rules for its ids. Raises ConfigError for a raw file without --dtype."""
    from data_pipeline.readers.id_arrays import stored_dtype
    from data_pipeline.readers.megatron import index_dtype

    dtype, mark = "", file.mark
    is_plain = not file.compression and not scheme_of(file.path)
    if file.kind == "bin":
        dtype = rules.dtype
        if not dtype:
            raise ConfigError(
                f"{shown(file.path)} has no .idx file, so it is read as raw integers, whose type "
                "is not in the file. Give it: --dtype uint16 (or uint32, int32, ...)"
            )
    elif file.kind == "npy" and is_plain:
        dtype = stored_dtype(file.path, file.compression)
    elif file.kind == "megatron" and is_plain:
        dtype = index_dtype(file.path)
        status = os.stat(index_path(file.path))  # noqa: PTH116 - as in find.py
        mark = f"{mark} {status.st_size} {status.st_mtime_ns}"
    return replace(file, ids=replace(rules, dtype=dtype), mark=mark)
