"""Token ids as documents: their text, the arrays .npy and .bin, and pairs of Megatron-LM.

A document of ids has a text like any other document: its ids as decimal numbers, separated by
single spaces, "60 62 64". Everything after the readers (hashes, deduplication, shuffling, resuming)
therefore treats both alike, and `tokenizers/ids.py` encodes this text to the same ids.

The end-of-document id may be at the beginning and end of a document, as some programs write it.
It is dropped there, because every tokenized document gets one. Inside a document it is an error.
The same holds for the id that fills up rows (`--padding`), if there is one.

bin, npy: a raw file (`--dtype`, little-endian) or an array of one dimension is a stream of ids, in
which the end-of-document id separates documents. Every row of an array of two dimensions is a
document; a row of one id only is probably padding and rejected, unless it is known which id is
padding. Arrays are never unpickled.

Plain arrays are cut into byte ranges that can be read independently; a document belongs to the
range that contains its first id.

megatron: NAME.bin with token ids, and NAME.idx with the bounds of its documents. Layout of the .idx
file, little-endian, of S sequences and D bounds of documents:

    9 bytes     b"MMIDIDX\\0\\0"
    uint64      version, 1
    uint8       code of the type of the ids
    uint64 x 2  S and D
    int32 [S]   ids in each sequence
    int64 [S]   byte offset of each sequence in the .bin file
    int64 [D]   sequences before each document, and S at the end: D - 1 documents

Source: NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

import io
import math
import struct
import tokenize
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from itertools import chain, groupby
from typing import BinaryIO

import numpy as np

from data_pipeline.errors import printable
from data_pipeline.readers.source import (
    CHUNK_BYTES,
    MAX_RECORD_BYTES,
    BadRecordError,
    BrokenStreamError,
    DocumentBuilder,
    IdRules,
    Record,
    Reject,
    Source,
    read_exactly,
)
from data_pipeline.system.sources import open_source

_HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\0\0"
_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""6 and 7 are floating-point types."""

# --- the text of ids ------------------------------------------------------------------------------


def text_of_value(value: object, rules: IdRules, name: str) -> str:
    """The text of a list of integers, the value of `name`. Raises BadRecordError."""
    if not isinstance(value, list):
        kind = "null" if value is None else type(value).__name__
        raise BadRecordError(f'"{name}" is not a list of token ids but {kind}')
    for position, each in enumerate(value):
        if type(each) is not int:  # bool is an int, too
            hint = "; give every track a line, and ids of one vocabulary"
            hint *= isinstance(each, list)
            kind = "null" if each is None else type(each).__name__
            reason = f'"{name}" has {kind} at position {position}, not a token id{hint}'
            raise BadRecordError(reason)
        if not 0 <= each < rules.vocab_size:
            raise rules.unknown(each, position)
    return text_of_array(np.array(value, np.int64), rules)


def text_of_array(ids: np.ndarray, rules: IdRules) -> str:
    """The text of a document, from its 1-D array of integers. Raises as `texts_of_chunks`."""
    return "".join(texts_of_chunks([ids], rules))


def texts_of_chunks(chunks: Iterable[np.ndarray], rules: IdRules) -> Iterator[str]:
    """The text of a document in pieces, from its consecutive arrays.

    Raises BadRecordError for an id outside the vocabulary, and for an end-of-document or padding
    id that is not at an end of the document.
    """
    position = first = num_ids = 0
    for ids in chunks:
        is_content = ids != rules.end_of_document
        if rules.padding is not None:
            is_content &= ids != rules.padding
        places = position + np.flatnonzero(is_content)
        position += len(ids)
        if not places.size:
            continue
        first = first if num_ids else int(places[0])
        expected = first + num_ids
        if places[-1] - expected + 1 != places.size:
            is_shifted = places != expected + np.arange(places.size)
            padding = "" if rules.padding is None else f" or padding id {rules.padding}"
            raise BadRecordError(
                f"the end-of-document id {rules.end_of_document}{padding} at position "
                f"{expected + int(np.argmax(is_shifted)):,} is inside the document; split the "
                "document there"
            )
        content = ids[is_content]
        is_unknown = (content < 0) | (content >= rules.vocab_size)
        if is_unknown.any():
            number = int(np.argmax(is_unknown))
            raise rules.unknown(content[number], expected + number)
        yield " " * (num_ids > 0) + " ".join(_decimals(rules.vocab_size)[content].tolist())
        num_ids += content.size


@lru_cache(maxsize=1)
def _decimals(vocab_size: int) -> np.ndarray:
    """str [vocab_size]. Looking up a number takes half the time of writing it."""
    return np.array([str(id_) for id_ in range(vocab_size)], dtype=object)


def text_of_npy(raw: bytes, rules: IdRules) -> str:
    """The text of an array of one dimension in the .npy format. Raises BadRecordError."""
    stream = io.BytesIO(raw)
    try:
        start, dtype, shape = _read_npy_header(stream)
    except BrokenStreamError as error:
        raise BadRecordError(error.reason) from None
    if shape != ((len(raw) - start) / dtype.itemsize,):
        raise BadRecordError(
            f"the array has shape {shape} and {len(raw) - start:,} bytes; a document has one "
            "dimension"
        )
    return text_of_array(np.frombuffer(raw, dtype, offset=start), rules)


# --- streams of documents -------------------------------------------------------------------------


def read_bin(source: Source) -> Iterator[Record | Reject]:
    return _read_separated(source, np.dtype(source.id_rules.dtype), 0, math.inf)


def read_npy(source: Source) -> Iterator[Record | Reject]:
    start, dtype, shape = _read_npy_header(source.stream)
    stop = start + math.prod(shape) * dtype.itemsize
    if len(shape) == 1:
        yield from _read_separated(source, dtype, start, stop)
    elif stop > start:
        yield from _read_rows(source, dtype, range(start, stop, shape[1] * dtype.itemsize))
    if source.stop >= stop and source.stream.read(1):
        raise BrokenStreamError("there are bytes after the end of the array", byte=stop)


def _read_separated(
    source: Source, dtype: np.dtype, start: int, stop: float
) -> Iterator[Record | Reject]:
    """The documents between end-of-document ids in the bytes [start, stop) of the stream.

    The stream is at `start`.
    """
    offset, is_inside = start, source.start > start
    if is_inside:  # the id before the range is an end-of-document id or not
        offset += (-(-(source.start - start) // dtype.itemsize) - 1) * dtype.itemsize
        source.stream.seek(offset)
    chunks = chunks_of(source.stream, stop - offset, dtype)
    pieces = _between(chunks, source.id_rules.end_of_document, offset)
    for num_ends, group in groupby(pieces, key=lambda piece: piece[0]):
        document = iter(group)
        if is_inside and not num_ends:  # of an earlier range
            if any(place >= source.stop for _, place, _ in document):
                return
            continue
        _, place, first = next(document)
        if place >= source.stop:
            return
        source.lines += 1
        rest = (ids for *_, ids in document)
        yield record_of_chunks(source, chain([first], rest), place)


def _between(
    chunks: Iterator[np.ndarray], end_id: int, offset: int
) -> Iterator[tuple[int, int, np.ndarray]]:
    """(number of end-of-document ids before it, its byte, ids) of each piece between these ids."""
    num_ends = 0
    for ids in chunks:
        begin = 0
        for end in [*np.flatnonzero(ids == end_id).tolist(), len(ids)]:
            if end > begin:
                yield num_ends, offset + begin * ids.itemsize, ids[begin:end]
            num_ends += end < len(ids)
            begin = end + 1
        offset += ids.nbytes


def _read_rows(source: Source, dtype: np.dtype, places: range) -> Iterator[Record | Reject]:
    """The rows that begin at these bytes of the stream, which is at the first one."""
    first, stop = bisect_left(places, source.start), bisect_left(places, source.stop)
    if first:
        source.stream.seek(places.start + first * places.step)
    for place in places[first:stop]:
        source.lines += 1
        if places.step > MAX_RECORD_BYTES:
            for _ in chunks_of(source.stream, places.step, dtype):  # to the next row
                pass
            yield source.reject(
                source.lines,
                place,
                f"a row of {places.step:,} bytes is one document, held in RAM, and longer than the "
                f"limit of {MAX_RECORD_BYTES:,}. Save the ids in one dimension, or as .bin",
            )
            continue
        row = np.concatenate(list(chunks_of(source.stream, places.step, dtype)))
        text_of = partial(_text_of_row, rules=source.id_rules)
        yield source.record(text_of, row, line=source.lines, byte=place)


def _text_of_row(row: np.ndarray, rules: IdRules) -> str:
    """The text of a row. Raises BadRecordError for one repeated id: it is probably padding."""
    may_be_padding = rules.padding is None and row[0] != rules.end_of_document
    if may_be_padding and row.size > 1 and (row == row[0]).all():
        raise BadRecordError(
            f"the row has only the id {row[0]}. If this id fills up the rows: --padding {row[0]}. "
            f"If they have no padding: --padding {rules.end_of_document}"
        )
    return text_of_array(row, rules)


def record_of_chunks(source: Source, chunks: Iterator[np.ndarray], byte: int) -> Record | Reject:
    """The document of all chunks, which begins at this byte."""
    document = DocumentBuilder(source, byte, source.lines)
    try:
        for text in texts_of_chunks(chunks, source.id_rules):
            document.add(text.encode())
    except BadRecordError as error:
        for _ in chunks:  # to the next document
            pass
        return source.reject(source.lines, byte, error.reason)
    return document.build()


def chunks_of(stream: BinaryIO, num_bytes: float, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Arrays of the next `num_bytes` of the stream; of all bytes to its end if infinite."""
    left, partial = num_bytes, 0
    # The stream is buffered: a short read is its end.
    while not partial and left > 0 and (raw := stream.read(int(min(CHUNK_BYTES, left)))):
        left -= len(raw)
        partial = len(raw) % dtype.itemsize
        yield np.frombuffer(raw[: len(raw) - partial], dtype)
    if 0 < left < math.inf:
        raise BrokenStreamError(f"truncated: {left:,} bytes of ids are missing at its end")
    if partial:
        raise BrokenStreamError(
            f"its size is not a multiple of {dtype.itemsize} bytes: truncated, or of another "
            f"--dtype than {dtype.name}"
        )


def _read_npy_header(stream: BinaryIO) -> tuple[int, np.dtype, tuple[int, ...]]:
    """(offset of the data, dtype, shape). Raises BrokenStreamError."""
    try:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):  # the others have long headers, for arrays with named columns
            raise ValueError(f"version {version}")
        # A Python literal, which numpy parses without evaluating it.
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    except (
        ValueError, TypeError, SyntaxError, MemoryError, RecursionError, tokenize.TokenError
    ) as error:  # fmt: skip
        reason = printable(str(error).split("\n")[0])[:160]
        raise BrokenStreamError(
            f"not an .npy array: {reason}. If it has only ids, as numpy.memmap and OLMo write "
            "them, rename it to .bin and give --dtype"
        ) from error
    in_columns = is_fortran and len(shape) == 2 and min(shape) > 1
    if dtype.kind not in "iu" or len(shape) not in (1, 2) or min(shape) < 0 or in_columns:
        order = "columns (save numpy.ascontiguousarray of it)" if in_columns else "rows"
        raise BrokenStreamError(
            f"the array is of {dtype} and shape {shape}, stored by {order}; token ids are integers "
            "in 1 or 2 dimensions, stored by rows. Python objects are never loaded"
        )
    return stream.tell(), dtype, shape


# --- pairs of Megatron-LM -------------------------------------------------------------------------


def index_path(path: str) -> str:
    """The path or URL of the .idx file with the bounds of the documents in a .bin file."""
    return path.removesuffix(".bin") + ".idx"


def read_pair(source: Source) -> Iterator[Record | Reject]:
    dtype, bounds = _index_of(index_path(source.file.path), source.file.mark)
    edges = bounds * dtype.itemsize
    first, stop = np.searchsorted(edges[:-1], (source.start, source.stop)).tolist()
    source.stream.seek(int(edges[first]))
    for place, end in zip(edges[first:stop].tolist(), edges[first + 1 :].tolist(), strict=False):
        source.lines += 1
        yield record_of_chunks(source, chunks_of(source.stream, end - place, dtype), place)
    if source.stop > edges[-1] and source.stream.read(1):
        raise BrokenStreamError(f"the file has more than the {edges[-1]:,} bytes of its index")


@lru_cache(maxsize=1)  # a process reads the ranges of a file one after the other
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
