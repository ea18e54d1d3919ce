"""megatron: a pair of files of Megatron-LM, NAME.bin with token ids and NAME.idx with documents.

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

import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

from data_pipeline.readers.id_arrays import sized_documents
from data_pipeline.readers.id_files import index_path
from data_pipeline.readers.records import BrokenStreamError, Record, Reject
from data_pipeline.readers.source import Source, read_exactly
from data_pipeline.storage.open_source import open_source
from data_pipeline.storage.source_errors import reject_reason

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\0\0"
_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""6 and 7 are floating-point types."""


class _Index(NamedTuple):
    dtype: np.dtype
    starts: np.ndarray  # int64 [documents]: byte offset of each document
    num_bytes: np.ndarray  # int64 [documents]


def read_megatron(source: Source) -> Iterator[Record | Reject]:
    """The documents of the pair; `source` is the .bin file."""
    try:
        with open_source(index_path(source.path), "") as stream:
            index = _read_index(stream)
        yield from sized_documents(source, index.dtype, index.starts, index.num_bytes)
        total = int(index.num_bytes.sum())
        if source.start:
            source.stream.seek(total)
        if source.stop > total and source.stream.read(1):
            raise ValueError(f"the .bin file has more than the {total:,} bytes of its .idx file")
    except OSError as error:
        raise BrokenStreamError(0, 0, reject_reason(error)) from error
    except ValueError as error:
        if isinstance(error, BrokenStreamError):
            raise
        raise BrokenStreamError(0, 0, str(error)) from error


def index_dtype(path: str) -> str:
    """The type of the ids of the .bin file at `path` as IdRules.dtype; "" if it is unknown."""
    try:
        with open_source(index_path(path), "") as stream:
            return _read_header(stream)[0].str
    except (OSError, ValueError):  # the reader reports the error
        return ""


def _read_header(stream: BinaryIO) -> tuple[np.dtype, int, int]:
    """(dtype of the ids, sequences, bounds of documents). Raises ValueError."""
    raw = read_exactly(stream, _HEADER.size)
    if len(raw) < _HEADER.size or raw[: len(_MAGIC)] != _MAGIC:
        raise ValueError("its .idx file is not an index of Megatron-LM")
    _, version, code, sequences, bounds = _HEADER.unpack(raw)
    if version != 1:
        raise ValueError(f"its .idx file has version {version}, supported is 1")
    if code not in _DTYPES:
        raise ValueError(f"its .idx file has type code {code}, which is not an integer type")
    return np.dtype(_DTYPES[code]), sequences, bounds


def _read_index(stream: BinaryIO) -> _Index:
    dtype, sequences, bounds = _read_header(stream)
    expected = 12 * sequences + 8 * bounds
    raw = read_exactly(stream, expected)
    if len(raw) < expected:
        raise ValueError(f"its .idx file is truncated: {expected - len(raw):,} bytes are missing")
    if stream.read(1):
        raise ValueError("its .idx file has more than ids, such as the modes of multimodal data")
    lengths = np.frombuffer(raw, "<i4", sequences).astype(np.int64)
    offsets = np.frombuffer(raw, "<i8", sequences, 4 * sequences)
    first = np.frombuffer(raw, "<i8", bounds, 12 * sequences)
    ends = np.cumsum(lengths) * dtype.itemsize
    if (lengths < 0).any() or not np.array_equal(offsets, ends - lengths * dtype.itemsize):
        raise ValueError("the sequences of its .idx file are not one after the other")
    if not bounds or first[0] or first[-1] != sequences or (np.diff(first) < 0).any():
        raise ValueError(f"the documents of its .idx file do not cover its {sequences:,} sequences")
    edges = np.concatenate([[0], ends])[first]
    return _Index(dtype, edges[:-1], np.diff(edges))
