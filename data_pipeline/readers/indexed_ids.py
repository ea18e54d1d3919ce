"""megatron and olmo: a file of token ids, and a file next to it with the bounds of its documents.

megatron is a pair of Megatron-LM, NAME.bin and NAME.idx. Layout of the .idx file, little-endian, of
S sequences and D bounds of documents:

    9 bytes     b"MMIDIDX\\0\\0"
    uint64      version, 1
    uint8       code of the type of the ids
    uint64 x 2  S and D
    int32 [S]   ids in each sequence
    int64 [S]   byte offset of each sequence in the .bin file
    int64 [D]   sequences before each document, and S at the end: D - 1 documents

olmo is a pair of the Dolma toolkit, for OLMo: NAME.npy, which has no header, but only the ids
(numpy.memmap, of `--dtype`), and NAME.csv.gz with a line `start,end,...` per document, in ids.

Sources: NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py; allenai/dolma,
python/dolma/tokenizer/memmap_writer.py; allenai/OLMo-core, `iter_document_indices`.
"""

import functools
import os
import struct
from array import array
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

from data_pipeline.errors import printable
from data_pipeline.readers.formats import InputFile
from data_pipeline.readers.id_arrays import read_npy_header, read_shard_header, sized_documents
from data_pipeline.readers.ids import index_path
from data_pipeline.readers.records import BrokenStreamError, Record, Reject
from data_pipeline.readers.source import Source, read_exactly
from data_pipeline.system.sources import open_source, scheme_of

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\0\0"
_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""6 and 7 are floating-point types."""
_MAX_LINE_BYTES = 2**16


class _PairIndex(NamedTuple):
    dtype: np.dtype | None
    """None if the index does not say it."""
    bounds: np.ndarray
    """int64 [documents + 1]: the ids before each document, and all ids."""


def read_pair(source: Source) -> Iterator[Record | Reject]:
    """The documents of a pair; `source` is the .bin or .npy file."""
    is_megatron = source.file.kind == "megatron"
    path = index_path(source.file.path)
    version = "" if scheme_of(path) else os.stat(path).st_mtime_ns  # noqa: PTH116 - as find.py
    index = _index_of(path, version, is_megatron=is_megatron)
    dtype = index.dtype or np.dtype(source.id_rules.dtype)
    edges = index.bounds * dtype.itemsize
    total = int(edges[-1])
    if not index.dtype and source.file.size not in (0, total):
        raise _broken(
            f"its .csv.gz file has bounds of {total:,} bytes of {dtype.name}, but the .npy "
            f"file has {source.file.size:,}: truncated, or of another --dtype"
        )
    yield from sized_documents(source, dtype, edges[:-1], np.diff(edges))
    if source.stop > total and source.stream.read(1):
        raise _broken(f"the file has more than the {total:,} bytes of its index")


@functools.lru_cache(maxsize=1)  # a process reads the ranges of a file one after the other
def _index_of(path: str, version: int | str, *, is_megatron: bool) -> _PairIndex:
    """The index at `path`. `version` tells a rewritten index from the one that was parsed."""
    with open_source(path, "" if is_megatron else "gz") as stream:
        return _read_index(stream) if is_megatron else _read_bounds(stream)


def stored_dtype(file: InputFile) -> str:
    """The type of the ids that a local file stores, as IdRules.dtype; "" if it is unknown."""
    try:
        if file.kind == "megatron":
            with open_source(index_path(file.path), "") as stream:
                return _read_header(stream)[0].str
        with open_source(file.path, "") as stream:
            if file.kind == "npy":
                return read_npy_header(stream, "")[1].str
            return read_shard_header(stream)[0].str if file.kind == "llm.c" else ""
    except (OSError, ValueError):  # the reader reports the error
        return ""


def _read_header(stream: BinaryIO) -> tuple[np.dtype, int, int]:
    """(dtype of the ids, sequences, bounds of documents). Raises BrokenStreamError."""
    raw = read_exactly(stream, _HEADER.size)
    if len(raw) < _HEADER.size or raw[: len(_MAGIC)] != _MAGIC:
        raise _broken("its .idx file is not an index of Megatron-LM")
    _, version, code, sequences, bounds = _HEADER.unpack(raw)
    if version != 1:
        raise _broken(f"its .idx file has version {version}, supported is 1")
    if code not in _DTYPES:
        raise _broken(f"its .idx file has type code {code}, which is not an integer type")
    return np.dtype(_DTYPES[code]), sequences, bounds


def _read_index(stream: BinaryIO) -> _PairIndex:
    dtype, sequences, bounds = _read_header(stream)
    expected = 12 * sequences + 8 * bounds
    raw = read_exactly(stream, expected)
    if len(raw) < expected:
        raise _broken(f"its .idx file is truncated: {expected - len(raw):,} bytes are missing")
    if stream.read(1):
        raise _broken("its .idx file has more than ids, such as the modes of multimodal data")
    lengths = np.frombuffer(raw, "<i4", sequences).astype(np.int64)
    offsets = np.frombuffer(raw, "<i8", sequences, 4 * sequences)
    first = np.frombuffer(raw, "<i8", bounds, 12 * sequences)
    ends = np.cumsum(lengths)
    if (lengths < 0).any() or not np.array_equal(offsets, (ends - lengths) * dtype.itemsize):
        raise _broken("the sequences of its .idx file are not one after the other")
    if not bounds or first[0] or first[-1] != sequences or (np.diff(first) < 0).any():
        raise _broken(f"the documents of its .idx file do not cover its {sequences:,} sequences")
    return _PairIndex(dtype, np.concatenate([[0], ends])[first])


def _read_bounds(stream: BinaryIO) -> _PairIndex:
    """The bounds in a .csv.gz file. Raises BrokenStreamError."""
    lines = iter(lambda: stream.readline(_MAX_LINE_BYTES), b"")
    bounds = array("q", [0])
    for number, line in enumerate(lines, start=1):
        start, _, rest = line.partition(b",")
        try:
            first, stop = int(start), int(rest.partition(b",")[0])
        except ValueError:
            shown = printable(line[:40].decode("utf-8", errors="replace"))
            raise _broken(
                f"line {number} of its .csv.gz file does not begin with START,END: {shown}"
            ) from None
        if first != bounds[-1] or not first <= stop < 2**60:
            raise _broken(
                f"line {number} of its .csv.gz file has the ids {first} to {stop}, but the next "
                f"document begins at {bounds[-1]}: documents must follow each other"
            )
        bounds.append(stop)
    return _PairIndex(None, np.frombuffer(bounds, np.int64))


def _broken(reason: str) -> BrokenStreamError:
    return BrokenStreamError(0, 0, reason)
