"""The sidecar index of one shard: where its frames, blocks and documents are.

A safetensors file. Every array is checked against the others and against the manifest's entry when
it is loaded, so that code that reads through an index needs no checks.

First tokens and ids of the documents are one packed table of 1 to 2 bytes per sentence: each file
name is stored once, lines and starts are stored as differences, in one zstd frame.

The safetensors metadata also describes the dataset and has a digest of the arrays, for people who
find a shard without its manifest. No code reads it.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from data_pipeline.shards.frames import MAX_FRAME_BYTES, FrameError, compress, decompress
from data_pipeline.shards.manifest import ShardEntry, TextCounts
from data_pipeline.shards.shard_files import damaged_file
from data_pipeline.system.remote_path import DatasetPath

MAX_TABLE_BYTES = 2**31
"""Larger tables are refused before decoding, whatever size a file declares."""
NO_LINE = -1
_COLUMNS = ("starts", "file", "line", "names", "name_ends")
_INDEX_TYPES = {
    "frames": (np.int64, 2),
    "block_tokens": (np.int64, 1),
    "block_offset": (np.int64, 1),
    "block_documents": (np.int64, 1),
    "documents": (np.uint8, 1),
}


@dataclass(frozen=True, slots=True, eq=False)
class DocumentIds:
    """The ids of D documents as columns: `names[file]`, and a colon and `line` unless it is -1."""

    names: Sequence[str]
    file: NDArray[np.int64]
    line: NDArray[np.int64]

    @classmethod
    def of(cls, ids: Sequence[str]) -> Self:
        return cls(ids, np.arange(len(ids)), np.full(len(ids), NO_LINE))

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, rows: slice) -> "DocumentIds":
        return DocumentIds(self.names, self.file[rows], self.line[rows])

    def id_of(self, number: int) -> str:
        name, line = self.names[self.file[number]], self.line[number]
        return name if line == NO_LINE else f"{name}:{line}"


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """The checked index of one shard: N blocks, D documents, F frames."""

    frames: np.ndarray
    """int64 [F, 5], columns as the fields of `frames.Frame`."""
    block_tokens: np.ndarray
    """int64 [N]: tokens of every block."""
    block_offset: np.ndarray
    """int64 [N]: raw byte of the block's first token in the tar stream."""
    block_documents: np.ndarray
    """int64 [N]: documents of every block."""
    document_starts: np.ndarray
    """int64 [D]: first token of every document, relative to its block's start. Read-only."""


# --- writing ------------------------------------------------------------------------------------


def index_bytes(
    arrays: dict[str, np.ndarray], *, text_bytes: int, text_counts: TextCounts, header: str
) -> bytes:
    """The content of an index file. `header` is the JSON of a `manifest.IndexHeader`."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode() + array.tobytes())
    metadata = {
        "arrays_sha256": digest.hexdigest(),
        "header": json.loads(header),
        "text_bytes": text_bytes,
        "text_counts": text_counts.model_dump(),
    }
    # One key only: safetensors writes several in an order that changes from run to run.
    return save(arrays, metadata={"txl": json.dumps(metadata, sort_keys=True)})


# --- reading ------------------------------------------------------------------------------------


def checked_index(
    data: bytes, directory: DatasetPath, entry: ShardEntry, itemsize: int
) -> tuple[ShardIndex, DocumentIds]:
    """Check the index in `data`, the content of an index file. Returns it with the documents' ids.

    Raises DataError naming the file and the problem.
    """
    path = directory / entry.index_name
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry.index_sha256:
        raise damaged_file(path, f"has sha256 {digest}, expected {entry.index_sha256}")
    try:
        arrays = load(data)
        _check_arrays(arrays, entry, itemsize)
        table = arrays.pop("documents").tobytes()
        starts, ids = unpack_documents(table, num_documents=entry.documents)
        _check_starts(starts, arrays)
    except (SafetensorError, KeyError, ValueError, AttributeError) as error:
        raise damaged_file(path, f"contradicts the manifest or itself: {error}") from error
    starts.flags.writeable = False  # the reader returns parts of it
    return ShardIndex(**arrays, document_starts=starts), ids


def _check_arrays(arrays: dict[str, np.ndarray], entry: ShardEntry, itemsize: int) -> None:
    """Raise ValueError with the first check that fails. The reader relies on all of these."""
    types = {name: (array.dtype, array.ndim) for name, array in arrays.items()}
    if types != {name: (np.dtype(kind), ndim) for name, (kind, ndim) in _INDEX_TYPES.items()}:
        raise ValueError(f"its arrays are {sorted(types)}")
    frames, tokens, offset = arrays["frames"], arrays["block_tokens"], arrays["block_offset"]
    documents = arrays["block_documents"]
    if frames.shape[1] != 5 or len(frames) < 1 or (frames < 0).any():
        raise ValueError("its table of frames")
    compressed, raw = frames[:, 0] + frames[:, 1], frames[:, 2] + frames[:, 3]
    checks = {
        "frame offsets": (frames[0, [0, 2]] == 0).all()
        and (frames[1:, 0] == compressed[:-1]).all()
        and (frames[1:, 2] == raw[:-1]).all()
        and compressed[-1] <= entry.bytes
        and raw[-1] == entry.raw_bytes,
        "frame sizes": (frames[:, 3] > 0).all() and (frames[:, [1, 3]] <= MAX_FRAME_BYTES).all(),
        "number of blocks": len(tokens) == len(offset) == len(documents) == entry.blocks > 0,
        "number of tokens": (tokens > 0).all() and tokens.sum() == entry.tokens,
        # Divided, not multiplied: a forged number of tokens times its size could overflow int64.
        "block offsets": len(offset) == len(tokens)
        and (offset >= 0).all()
        and (tokens <= (entry.raw_bytes - offset) // itemsize).all(),
        "number of documents": (documents > 0).all()
        and (documents <= entry.documents).all()
        and documents.sum() == entry.documents,
    }
    if failed := [name for name, holds in checks.items() if not holds]:
        raise ValueError(failed[0])


def _check_starts(starts: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
    """Raise ValueError unless starts rise from 0 and stay inside the block, in every block."""
    tokens, documents = arrays["block_tokens"], arrays["block_documents"]
    first_document = np.cumsum(documents) - documents
    rising = np.diff(starts) > 0
    rising[first_document[1:] - 1] = True  # the next block starts again from 0
    inside = starts < np.repeat(tokens, documents)
    if (starts[first_document] != 0).any() or not rising.all() or not inside.all():
        raise ValueError("document starts")


# --- the table of documents -----------------------------------------------------------------------


def pack_documents(starts: NDArray[np.int64], ids: Sequence[DocumentIds]) -> bytes:
    """The packed table of consecutive documents with first tokens `starts` [D]."""
    number_of: dict[str, int] = {}
    no_documents = np.empty((2, 0), np.int64)
    parts = [no_documents, *(_number_names(part, number_of) for part in ids)]
    file, line = np.concatenate(parts, axis=1)
    names = [name.encode("utf-8") for name in number_of]
    columns = {
        "starts": _steps(np.asarray(starts, np.int64)),
        "file": _steps(file),
        "line": _steps(line),
        "names": np.frombuffer(b"".join(names), np.uint8),
        "name_ends": np.cumsum([len(name) for name in names], dtype=np.int64),
    }
    return compress(save(columns))


def unpack_documents(data: bytes, *, num_documents: int) -> tuple[NDArray[np.int64], DocumentIds]:
    """First tokens and ids: the inverse of `pack_documents`.

    Raises ValueError for other or damaged bytes.
    """
    try:
        columns = load(decompress(data, limit=MAX_TABLE_BYTES))
    except (FrameError, SafetensorError, KeyError, AttributeError) as error:
        raise ValueError(f"its document table cannot be read: {error}") from error
    if set(columns) != set(_COLUMNS) or any(x.ndim != 1 for x in columns.values()):
        raise ValueError(f"its document table has the columns {sorted(columns)}")
    starts, file, line = (np.cumsum(columns[name], dtype=np.int64) for name in _COLUMNS[:3])
    ends = columns["name_ends"].astype(np.int64)
    content = columns["names"].tobytes()
    rising = np.diff(np.concatenate([[0], ends, [len(content)]]))
    if {len(starts), len(file), len(line)} != {num_documents} or (rising < 0).any():
        raise ValueError(f"its document table is not of {num_documents:,} documents")
    if num_documents and not 0 <= file.min() <= file.max() < len(ends):
        raise ValueError("its document table refers to files that it does not list")
    first = np.concatenate([[0], ends[:-1]])[: len(ends)]
    parts = (content[low:high] for low, high in zip(first, ends, strict=True))
    names = tuple(part.decode("utf-8", errors="replace") for part in parts)
    return starts, DocumentIds(names, file, line)


def _number_names(ids: DocumentIds, number_of: dict[str, int]) -> NDArray[np.int64]:
    """int64 [2, D]: number of each document's name, and its line; adds new names to `number_of`.

    Names are numbered in the order in which they first appear.
    """
    keys = 2 * ids.file + (ids.line != NO_LINE)
    used, first, key_of = np.unique(keys, return_index=True, return_inverse=True)
    columns = np.empty((2, len(used)), np.int64)
    for key in np.argsort(first).tolist():
        file, has_line = divmod(int(used[key]), 2)
        # A name without a line may itself end in a colon and digits.
        name, line = (ids.names[file], NO_LINE) if has_line else _split_id(ids.names[file])
        columns[:, key] = number_of.setdefault(name, len(number_of)), line
    return np.stack(
        [columns[0, key_of], np.where(ids.line != NO_LINE, ids.line, columns[1, key_of])]
    )


def _split_id(id_: str) -> tuple[str, int]:
    name, colon, line = id_.rpartition(":")
    # Only numbers that int64 holds and that are printed in the same way: not "01".
    plain = line.isascii() and line.isdigit() and str(int(line[:18] or 0)) == line
    return (name, int(line)) if colon and plain else (id_, NO_LINE)


def _steps(column: NDArray[np.int64]) -> NDArray[Any]:
    """Differences of consecutive entries, as int32 if they fit."""
    steps = np.diff(column, prepend=0)
    small = np.abs(steps).max(initial=0) < 2**31
    return steps.astype(np.int32) if small else steps
