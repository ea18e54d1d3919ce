"""Pairs of Megatron-LM: NAME.bin with token ids, and NAME.idx with the bounds of its documents.

Layout of the .idx file, little-endian, of S sequences and D bounds of documents:

    9 bytes     b"MMIDIDX\\0\\0"
    uint64      version, 1
    uint8       code of the type of the ids
    uint64 x 2  S and D
    int32 [S]   ids in each sequence
    int64 [S]   byte offset of each sequence in the .bin file
    int64 [D]   sequences before each document, and S at the end: D - 1 documents

Source: NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

import functools
import os
import struct
from collections.abc import Iterator

import numpy as np

from data_pipeline.readers.ids import read_sized
from data_pipeline.readers.input_file import index_path
from data_pipeline.readers.records import BrokenStreamError, Record, Reject
from data_pipeline.readers.source import Source, read_exactly
from data_pipeline.system.sources import open_source, scheme_of

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\0\0"
_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""6 and 7 are floating-point types."""


def read_pair(source: Source) -> Iterator[Record | Reject]:
    """The documents of a pair; `source` is the .bin file."""
    path = index_path(source.file.path)
    version = "" if scheme_of(path) else os.stat(path).st_mtime_ns  # noqa: PTH116 - as find.py
    dtype, bounds = _index_of(path, version)
    edges = bounds * dtype.itemsize
    yield from read_sized(source, dtype, edges[:-1], np.diff(edges))
    if source.stop > edges[-1] and source.stream.read(1):
        raise _broken(f"the file has more than the {edges[-1]:,} bytes of its index")


@functools.lru_cache(maxsize=1)  # a process reads the ranges of a file one after the other
def _index_of(path: str, version: int | str) -> tuple[np.dtype, np.ndarray]:
    """(dtype of the ids, int64 [documents + 1]: the ids before each document, and all ids).

    `version` tells a rewritten index from the one that was parsed. Raises BrokenStreamError.
    """
    with open_source(path, "") as stream:
        header = read_exactly(stream, _HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise _broken("its .idx file is not an index of Megatron-LM")
        _, version, code, sequences, bounds = _HEADER.unpack(header)
        if version != 1:
            raise _broken(f"its .idx file has version {version}, supported is 1")
        if code not in _DTYPES:
            raise _broken(f"its .idx file has type code {code}, which is not an integer type")
        expected = 12 * sequences + 8 * bounds
        raw = read_exactly(stream, expected)
        if len(raw) < expected:
            raise _broken(f"its .idx file is truncated: {expected - len(raw):,} bytes are missing")
        if stream.read(1):
            raise _broken("its .idx file has more than ids, such as the modes of multimodal data")
    dtype = np.dtype(_DTYPES[code])
    lengths = np.frombuffer(raw, "<i4", sequences).astype(np.int64)
    offsets = np.frombuffer(raw, "<i8", sequences, 4 * sequences)
    first = np.frombuffer(raw, "<i8", bounds, 12 * sequences)
    ends = np.cumsum(lengths)
    if (lengths < 0).any() or not np.array_equal(offsets, (ends - lengths) * dtype.itemsize):
        raise _broken("the sequences of its .idx file are not one after the other")
    if not bounds or first[0] or first[-1] != sequences or (np.diff(first) < 0).any():
        raise _broken(f"the documents of its .idx file do not cover its {sequences:,} sequences")
    return dtype, np.concatenate([[0], ends])[first]


def _broken(reason: str) -> BrokenStreamError:
    return BrokenStreamError(0, 0, reason)
