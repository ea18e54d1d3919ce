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
import struct
from collections.abc import Iterator

import numpy as np

from data_pipeline.readers.ids import chunks_of, record_of_chunks
from data_pipeline.readers.records import BrokenStreamError, Record, Reject
from data_pipeline.readers.source import Source, read_exactly
from data_pipeline.system.sources import open_source

_HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\0\0"
_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""6 and 7 are floating-point types."""


def index_path(path: str) -> str:
    """The path or URL of the .idx file with the bounds of the documents in a .bin file."""
    return path.removesuffix(".bin") + ".idx"


def read_pair(source: Source) -> Iterator[Record | Reject]:
    """The documents of a pair; `source` is the .bin file."""
    dtype, bounds = _index_of(index_path(source.file.path), source.file.mark)
    edges = bounds * dtype.itemsize
    first, stop = np.searchsorted(edges[:-1], (source.start, source.stop)).tolist()
    source.stream.seek(int(edges[first]))
    for place, end in zip(edges[first:stop].tolist(), edges[first + 1 :].tolist(), strict=False):
        source.lines += 1
        yield record_of_chunks(source, chunks_of(source.stream, end - place, dtype), place)
    if source.stop > edges[-1] and source.stream.read(1):
        raise BrokenStreamError(f"the file has more than the {edges[-1]:,} bytes of its index")


@functools.lru_cache(maxsize=1)  # a process reads the ranges of a file one after the other
def _index_of(path: str, mark: str) -> tuple[np.dtype, np.ndarray]:
    """(dtype of the ids, int64 [documents + 1]: the ids before each document, and all ids).

    `mark` tells a rewritten index from the one that was parsed. Raises BrokenStreamError.
    """
    with open_source(path, "") as stream:
        header = read_exactly(stream, _HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(MAGIC):
            raise BrokenStreamError("its .idx file is not an index of Megatron-LM")
        _, version, code, sequences, bounds = _HEADER.unpack(header)
        if version != 1 or code not in _DTYPES:
            raise BrokenStreamError(
                f"its .idx file has version {version} and type code {code}; supported are version "
                "1 and integer types"
            )
        expected = 12 * sequences + 8 * bounds
        raw = read_exactly(stream, expected)
        if len(raw) < expected or stream.read(1):
            raise BrokenStreamError(
                f"its .idx file is truncated, or has more than ids: expected {expected:,} bytes "
                "after its header"
            )
    dtype = np.dtype(_DTYPES[code])
    lengths = np.frombuffer(raw, "<i4", sequences).astype(np.int64)
    offsets = np.frombuffer(raw, "<i8", sequences, 4 * sequences)
    first = np.frombuffer(raw, "<i8", bounds, 12 * sequences)
    ends = np.cumsum(lengths)
    if (lengths < 0).any() or not np.array_equal(offsets, (ends - lengths) * dtype.itemsize):
        raise BrokenStreamError("the sequences of its .idx file are not one after the other")
    if not bounds or first[0] or first[-1] != sequences or (np.diff(first) < 0).any():
        raise BrokenStreamError(
            f"the documents of its .idx file do not cover its {sequences:,} sequences"
        )
    return dtype, np.concatenate([[0], ends])[first]
