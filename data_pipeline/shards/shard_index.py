"""One shard against its manifest entry: its size, its sidecar index, its frames.

Every array of the index is checked against the others and the entry before anything relies on it,
so that whoever reads through it needs no checks of its own. All refusals name file and place.

An index also describes its dataset and vouches for itself, in safetensors metadata that reading
shards does not need: `rebuild.py` makes a new manifest from it.
"""

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from data_pipeline.errors import DataError, printable
from data_pipeline.shards.document_table import DocumentTable, unpack_documents
from data_pipeline.shards.frames import MAX_FRAME_BYTES, Frame, FrameError, decode_frame
from data_pipeline.shards.manifest import ShardEntry
from data_pipeline.storage import strict_json
from data_pipeline.storage.remote_path import DatasetPath, RemotePath
from data_pipeline.storage.source_errors import is_unread

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
    """The sidecar index of one shard, checked. N blocks, D documents, F frames."""

    frames: np.ndarray
    """int64 [F, 5], columns as `frames.FRAME_COLUMNS`."""
    block_tokens: np.ndarray
    block_offset: np.ndarray
    """int64 [N]: raw byte of the block's first token in the tar stream."""
    block_documents: np.ndarray
    documents: DocumentTable

    @property
    def document_starts(self) -> np.ndarray:
        """int64 [D]: first token of every document, from its block's start."""
        return self.documents.starts

    def document_id(self, document: int) -> str:
        return self.documents.document_id(document)

    def frame(self, number: int) -> Frame:
        return Frame(*map(int, self.frames[number]))


def index_bytes(arrays: dict[str, np.ndarray], *, text_bytes: int, header: str) -> bytes:
    """The content of an index file. `header` is JSON about the dataset (`prepare.py` writes it)."""
    about = {
        "arrays_sha256": _arrays_sha256(arrays),
        "header": json.loads(header),
        "text_bytes": text_bytes,
    }
    # One key only: safetensors writes several in an order that changes from run to run.
    return save(arrays, metadata={"txl": json.dumps(about, sort_keys=True)})


def read_about(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of an index file that no manifest vouches for, and its `header`, `text_bytes`.

    Raises DataError when it is damaged or was written without them.
    """
    try:
        _size_of(path, path.parent)
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {})["txl"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        sound = about["arrays_sha256"] == _arrays_sha256(arrays)
        if (
            not sound
            or not isinstance(about["header"], dict)
            or type(about["text_bytes"]) is not int
        ):
            raise ValueError("its content is not what it vouches for")
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise refusal(path, path.parent, f"describes no dataset ({error})") from error
    return arrays, about


def _arrays_sha256(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode() + array.tobytes())
    return digest.hexdigest()


def read_index(directory: DatasetPath, entry: ShardEntry, itemsize: int) -> ShardIndex:
    """Load and check the index of a shard; DataError names the file and what is wrong with it."""
    data = read_piece(directory / entry.index_name, directory, 0, entry.index_bytes)
    return checked_index(data, directory, entry, itemsize)


def checked_index(
    data: bytes, directory: DatasetPath, entry: ShardEntry, itemsize: int
) -> ShardIndex:
    """The index that `data`, the content of its file, holds; DataError as `read_index`."""
    path = directory / entry.index_name
    if len(data) != entry.index_bytes:
        raise refusal(path, directory, f"is {len(data):,} bytes, expected {entry.index_bytes:,}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry.index_sha256:
        raise refusal(path, directory, f"has sha256 {digest}, expected {entry.index_sha256}")
    try:
        arrays = load(data)
    except (SafetensorError, KeyError, ValueError, AttributeError) as error:
        raise refusal(path, directory, f"is no safetensors file ({error})") from error
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
        raise refusal(path, directory, f"contradicts the manifest or itself: {problem}")
    return ShardIndex(**arrays, documents=documents)


def _index_problem(arrays: dict[str, np.ndarray], entry: ShardEntry, itemsize: int) -> str:
    """What makes the index unusable, or an empty string. All that reading relies on is here."""
    found = {name: (array.dtype, array.ndim) for name, array in arrays.items()}
    if found != {name: (np.dtype(kind), ndim) for name, (kind, ndim) in _INDEX_TYPES.items()}:
        return f"its arrays are {sorted(found)}"
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
        "block offsets": len(offset) == len(tokens)
        and (offset >= 0).all()
        and (tokens <= (entry.raw_bytes - offset) // itemsize).all(),
        "number of documents": (documents > 0).all()
        and (documents <= entry.documents).all()
        and documents.sum() == entry.documents,
    }
    return next((name for name, holds in checks.items() if not holds), "")


def _starts_problem(starts: np.ndarray, arrays: dict[str, np.ndarray]) -> str:
    """What is wrong with where documents start in their blocks, or an empty string."""
    tokens, documents = arrays["block_tokens"], arrays["block_documents"]
    first_document = np.cumsum(documents) - documents
    rising = np.diff(starts) > 0
    rising[first_document[1:] - 1] = True  # a new block starts again from 0
    inside = starts < np.repeat(tokens, documents)
    if (starts[first_document] != 0).any() or not rising.all() or not inside.all():
        return "document starts"
    return ""


def read_block_tokens(directory: DatasetPath, entry: ShardEntry) -> np.ndarray:
    """int64 [blocks]: tokens of every block of a shard, by one small read of its index.

    All that a plan needs of a shard it may never read. No hash covers a part of a file: number and
    sum must be the manifest's, and whoever reads the shard compares with the whole, hashed index.
    """
    path = directory / entry.index_name
    # txl writes two arrays of this size before it: mostly the first read has all.
    usual = _USUAL_HEADER_BYTES + 3 * 8 * entry.blocks
    start = read_piece(path, directory, 0, min(entry.index_bytes, usual))
    header_end = 8 + int.from_bytes(start[:8], "little")
    try:
        if header_end > _MAX_HEADER_BYTES:
            raise ValueError("its header does not end")
        if header_end > len(start):
            start = read_piece(path, directory, 0, header_end)
        about = strict_json.parse(start[8:header_end])["block_tokens"]
        if (about["dtype"], about["shape"]) != ("I64", [entry.blocks]):
            raise ValueError(f"block_tokens is {about['dtype']} {about['shape']}")
        first, last = (header_end + offset for offset in about["data_offsets"])
        if last - first != 8 * entry.blocks or not header_end <= first <= entry.index_bytes:
            raise ValueError("block_tokens lies elsewhere")
        if last <= len(start):
            data = start[first:last]
        else:
            data = read_piece(path, directory, first, last - first)
        tokens = np.frombuffer(data, "<i8").astype(np.int64, copy=False)
        if len(tokens) != entry.blocks or (tokens <= 0).any() or tokens.sum() != entry.tokens:
            raise ValueError(f"blocks do not sum to {entry.tokens:,} tokens")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        problem = f"contradicts the manifest or itself: {printable(str(error))[:200]}"
        raise refusal(path, directory, problem) from error
    return tokens


def read_frame(directory: DatasetPath, entry: ShardEntry, frame: Frame, number: int) -> bytes:
    """Read and decode one frame of a shard, or DataError with its place and the cause."""
    path = directory / entry.name
    data = read_piece(
        path, directory, frame.compressed_offset, frame.compressed_size, _place(frame, number)
    )
    return checked_frame(data, path, frame, number)


def checked_frame(data: bytes, path: DatasetPath, frame: Frame, number: int) -> bytes:
    """A frame of the shard at `path`, decoded, or DataError with its place and the cause."""
    try:
        return decode_frame(data, frame)
    except FrameError as error:
        problem = f"{_place(frame, number)} is damaged: {error}"
        raise refusal(path, path.parent, problem) from error


def _place(frame: Frame, number: int) -> str:
    return f"frame {number} at byte {frame.compressed_offset:,}"


def read_piece(
    path: DatasetPath, directory: DatasetPath, first: int, size: int, what: str = ""
) -> bytes:
    """Bytes [first, first + size) of a file, fewer if it ends before; DataError if it fails."""
    try:
        if isinstance(path, RemotePath):
            return path.read_range(first, size)
        # Opened for every read: a corpus may have more shards than a process may have open files.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return os.pread(descriptor, size, first)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise unreadable(path, directory, what, error) from error


def check_sizes(directory: DatasetPath, entries: Sequence[ShardEntry]) -> None:
    """Refuse shards and indexes that are missing or not as long as the manifest says.

    Web servers are not asked: they list nothing, and all that is read is checked anyway.
    """
    remote = isinstance(directory, RemotePath)
    try:
        listed = directory.sizes() if isinstance(directory, RemotePath) else {}
    except OSError as error:
        raise unreadable(directory, directory, "", error) from error
    if remote and not listed:
        return
    for entry in entries:
        for name, expected in (
            (entry.name, entry.bytes),
            (entry.index_name, entry.index_bytes),
        ):
            path = directory / name
            found = listed.get(name) if remote else _size_of(path, directory)
            if found is None:
                raise refusal(path, directory, "is missing")
            if found != expected:
                raise refusal(path, directory, f"is {found:,} bytes, expected {expected:,}")


def _size_of(path: DatasetPath, directory: DatasetPath) -> int:
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, directory, "", error) from error
    if not stat.S_ISREG(status.st_mode):
        raise refusal(path, directory, "is not a regular file")
    return int(status.st_size)


def unreadable(path: DatasetPath, directory: DatasetPath, what: str, error: OSError) -> DataError:
    """A DataError for a read that failed: of `what` in the file, or of all of it."""
    problem = f"{what} cannot be read ({error.strerror})".lstrip()
    if not is_unread(error):
        return refusal(path, directory, problem)
    return DataError(
        f"{path} {problem}. Check {what_to_check(path)}, then run it again: nothing here was "
        "changed."
    )


def what_to_check(path: DatasetPath) -> str:
    """What may be at fault when a file cannot be read."""
    if isinstance(path, RemotePath):
        return "the address, the credentials and the network"
    return "the disk and the permissions"


def refusal(path: DatasetPath, directory: DatasetPath, problem: str) -> DataError:
    return DataError(
        f"{path} {problem}. The file was cut short, damaged, or swapped with another after it was "
        f"written. To list everything that is wrong: txl data verify {directory}"
    )
