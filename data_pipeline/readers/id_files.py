"""The rules of ids of each input file: how arrays store them, known before they are read."""

import os
from dataclasses import replace

from data_pipeline.errors import ConfigError
from data_pipeline.readers.formats import InputFile
from data_pipeline.readers.id_arrays import stored_dtype
from data_pipeline.readers.megatron import index_dtype, index_path
from data_pipeline.readers.token_ids import IdRules
from data_pipeline.storage.urls import scheme_of, shown


def with_ids(file: InputFile, rules: IdRules) -> InputFile:
    """`file` with the rules for its ids. Raises ConfigError for a raw file without --dtype."""
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
