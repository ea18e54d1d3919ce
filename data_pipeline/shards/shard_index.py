"""The sidecar index of one shard: where its frames, blocks and documents are.

A safetensors file. Every array is checked against the others and against the manifest's entry when
it is loaded, so that code that reads through an index needs no checks. Errors name the file.

The safetensors metadata also describes the dataset and has a digest of the arrays. Reading shards
does not need it: `rebuild.py` makes a lost manifest from it.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from data_pipeline.errors import printable
from data_pipeline.shards.document_table import DocumentTable, unpack_documents
from data_pipeline.shards.frames import MAX_FRAME_BYTES, Frame
from data_pipeline.shards.manifest import ShardEntry
from data_pipeline.shards.shard_files import damaged_file, read_bytes_at
from data_pipeline.shards.text_counts import TextCounts
from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.system.strict_json import parse_json

_MAX_HEADER_BYTES = 2**16
_USUAL_HEADER_BYTES = 4096
_INDEX_TYPES = {
    "frames": (np.int64, 2),
    "block_tokens": (np.int64, 1),
    "block_offset": (np.int64, 1),
    "block_documents": (np.int64, 1),
    "documents": (np.uint8, 1),
}


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
    documents: DocumentTable

    @property
    def document_starts(self) -> np.ndarray:
        """int64 [D]: first token of every document, relative to its block's start."""
        return self.documents.starts

    def document_id(self, document: int) -> str:
        return self.documents.document_id(document)

    def frame(self, number: int) -> Frame:
        return Frame(*self.frames[number].tolist())


# --- writing ------------------------------------------------------------------------------------


def index_bytes(
    arrays: dict[str, np.ndarray],
    *,
    text_bytes: int,
    header: str,
    text_counts: TextCounts | None = None,
) -> bytes:
    """The content of an index file. `header` is the JSON of a `manifest.IndexHeader`."""
    metadata = {
        "arrays_sha256": _arrays_sha256(arrays),
        "header": json.loads(header),
        "text_bytes": text_bytes,
    }
    if text_counts is not None:
        metadata["text_counts"] = text_counts.model_dump()
    # One key only: safetensors writes several in an order that changes from run to run.
    return save(arrays, metadata={"txl": json.dumps(metadata, sort_keys=True)})


def _arrays_sha256(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode() + array.tobytes())
    return digest.hexdigest()


# --- reading with a manifest --------------------------------------------------------------------


def read_index(directory: DatasetPath, entry: ShardEntry, itemsize: int) -> ShardIndex:
    """Load and check the index of a shard. Raises DataError naming the file and the problem."""
    data = read_bytes_at(directory / entry.index_name, directory, 0, entry.index_bytes)
    return checked_index(data, directory, entry, itemsize)


def checked_index(
    data: bytes, directory: DatasetPath, entry: ShardEntry, itemsize: int
) -> ShardIndex:
    """The index in `data`, the content of an index file. Raises DataError like `read_index`."""
    path = directory / entry.index_name
    if len(data) != entry.index_bytes:
        problem = f"is {len(data):,} bytes, expected {entry.index_bytes:,}"
        raise damaged_file(path, directory, problem)
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry.index_sha256:
        raise damaged_file(path, directory, f"has sha256 {digest}, expected {entry.index_sha256}")
    try:
        arrays = load(data)
    except (SafetensorError, KeyError, ValueError, AttributeError) as error:
        raise damaged_file(path, directory, f"is not a safetensors file ({error})") from error
    problem = _index_problem(arrays, entry, itemsize)
    if not problem:
        table = arrays.pop("documents").tobytes()
        try:
            documents = unpack_documents(table, num_documents=entry.documents)
        except ValueError as error:
            problem = str(error)
        else:
            problem = _starts_problem(documents.starts, arrays)
    if problem:
        raise damaged_file(path, directory, f"contradicts the manifest or itself: {problem}")
    return ShardIndex(**arrays, documents=documents)


def _index_problem(arrays: dict[str, np.ndarray], entry: ShardEntry, itemsize: int) -> str:
    """The name of the first check that fails, or "". The reader relies on all of these."""
    types = {name: (array.dtype, array.ndim) for name, array in arrays.items()}
    if types != {name: (np.dtype(kind), ndim) for name, (kind, ndim) in _INDEX_TYPES.items()}:
        return f"its arrays are {sorted(types)}"
    frames, tokens, offset = arrays["frames"], arrays["block_tokens"], arrays["block_offset"]
    documents = arrays["block_documents"]
    if frames.shape[1] != 5 or len(frames) < 1 or (frames < 0).any():
        return "its table of frames"
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
    return next((name for name, holds in checks.items() if not holds), "")


def _starts_problem(starts: np.ndarray, arrays: dict[str, np.ndarray]) -> str:
    """ "document starts" unless they rise from 0 and stay inside the block, in every block."""
    tokens, documents = arrays["block_tokens"], arrays["block_documents"]
    first_document = np.cumsum(documents) - documents
    rising = np.diff(starts) > 0
    rising[first_document[1:] - 1] = True  # the next block starts again from 0
    inside = starts < np.repeat(tokens, documents)
    if (starts[first_document] != 0).any() or not rising.all() or not inside.all():
        return "document starts"
    return ""


def read_block_tokens(directory: DatasetPath, entry: ShardEntry) -> np.ndarray:
    """int64 [blocks]: tokens of every block of a shard, usually by one small read of its index.

    Opening a split needs no more than this of each shard, and most ranks read few of the shards.
    No hash covers a part of a file, so only the number of blocks and their sum are checked here;
    `SplitReader` compares the sizes with the hashed index when it first reads the shard.
    """
    path = directory / entry.index_name
    # txl writes two arrays of this size before `block_tokens`: one read usually covers all three.
    usual = _USUAL_HEADER_BYTES + 3 * 8 * entry.blocks
    start = read_bytes_at(path, directory, 0, min(entry.index_bytes, usual))
    header_end = 8 + int.from_bytes(start[:8], "little")
    try:
        if header_end > _MAX_HEADER_BYTES:
            raise ValueError(f"its header is longer than {_MAX_HEADER_BYTES:,} bytes")
        if header_end > len(start):
            start = read_bytes_at(path, directory, 0, header_end)
        column = parse_json(start[8:header_end])["block_tokens"]
        if (column["dtype"], column["shape"]) != ("I64", [entry.blocks]):
            raise ValueError(f"block_tokens is {column['dtype']} {column['shape']}")
        first, last = (header_end + offset for offset in column["data_offsets"])
        if last - first != 8 * entry.blocks or not header_end <= first <= entry.index_bytes:
            raise ValueError("block_tokens has wrong offsets")
        if last <= len(start):
            data = start[first:last]
        else:
            data = read_bytes_at(path, directory, first, last - first)
        tokens = np.frombuffer(data, "<i8").astype(np.int64, copy=False)
        if len(tokens) != entry.blocks or (tokens <= 0).any() or tokens.sum() != entry.tokens:
            raise ValueError(f"blocks do not sum to {entry.tokens:,} tokens")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        problem = f"contradicts the manifest or itself: {printable(str(error))[:200]}"
        raise damaged_file(path, directory, problem) from error
    return tokens


# --- reading without a manifest -----------------------------------------------------------------


def read_unlisted_index(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of an index that no manifest lists, and its metadata (`index_bytes`).

    The arrays are checked against their digest in the metadata, which itself has none. Raises
    DataError for a damaged file.
    """
    try:
        if not path.is_file():  # opening a named pipe would wait for its writer
            raise ValueError("it is not a regular file")
        with safe_open(path, framework="numpy") as file:
            metadata = json.loads((file.metadata() or {})["txl"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata["arrays_sha256"] != _arrays_sha256(arrays):
            raise ValueError("its arrays do not match their sha256")
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise damaged_file(path, path.parent, f"does not describe a dataset ({error})") from error
    return arrays, metadata
