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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from data_pipeline.errors import DataError
from data_pipeline.frames import MAX_FRAME_BYTES, Frame, FrameError, decode_frame
from data_pipeline.manifest import ShardEntry

_INDEX_TYPES = {
    "frames": (np.int64, 2),
    "block_tokens": (np.int64, 1),
    "block_offset": (np.int64, 1),
    "block_documents": (np.int64, 1),
    "document_starts": (np.int64, 1),
    "document_id_bytes": (np.uint8, 1),
    "document_id_offsets": (np.int64, 1),
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
    document_starts: np.ndarray
    """int64 [D]: first token of every document, from its block's start."""
    document_id_bytes: np.ndarray
    document_id_offsets: np.ndarray
    """int64 [D + 1]: document i's id is document_id_bytes[offsets[i]:offsets[i + 1]], in UTF-8."""

    def document_id(self, document: int) -> str:
        first, last = self.document_id_offsets[document : document + 2]
        return self.document_id_bytes[first:last].tobytes().decode("utf-8", errors="replace")

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


def read_index(directory: Path, entry: ShardEntry, itemsize: int) -> ShardIndex:
    """Load and check the index of a shard; DataError names the file and what is wrong with it."""
    path = directory / entry.index_name
    found = _size_of(path, directory)
    if found != entry.index_bytes:
        raise refusal(path, directory, f"is {found:,} bytes, expected {entry.index_bytes:,}")
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry.index_sha256:
        raise refusal(path, directory, f"has sha256 {digest}, expected {entry.index_sha256}")
    try:
        arrays = load(data)
    except (SafetensorError, KeyError, ValueError, AttributeError) as error:
        raise refusal(path, directory, f"is no safetensors file ({error})") from error
    problem = _index_problem(arrays, entry, itemsize)
    if problem:
        raise refusal(path, directory, f"contradicts the manifest or itself: {problem}")
    return ShardIndex(**arrays)


def _index_problem(arrays: dict[str, np.ndarray], entry: ShardEntry, itemsize: int) -> str:
    """What makes the index unusable, or an empty string. All that reading relies on is here."""
    found = {name: (array.dtype, array.ndim) for name, array in arrays.items()}
    if found != {name: (np.dtype(kind), ndim) for name, (kind, ndim) in _INDEX_TYPES.items()}:
        return f"its arrays are {sorted(found)}"
    frames, tokens, offset = arrays["frames"], arrays["block_tokens"], arrays["block_offset"]
    documents, starts = arrays["block_documents"], arrays["document_starts"]
    id_offsets = arrays["document_id_offsets"]
    if frames.shape[1] != 5 or len(frames) < 1 or (frames < 0).any():
        return "its table of frames"
    compressed, raw = frames[:, 0] + frames[:, 1], frames[:, 2] + frames[:, 3]
    first_document = np.cumsum(documents) - documents
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
        and documents.sum() == len(starts) == entry.documents,
        "document ids": len(id_offsets) == entry.documents + 1
        and id_offsets[0] == 0
        and (np.diff(id_offsets) >= 0).all()
        and id_offsets[-1] == len(arrays["document_id_bytes"]),
    }
    problem = next((name for name, holds in checks.items() if not holds), "")
    if problem:
        return problem
    rising = np.diff(starts) > 0
    rising[first_document[1:] - 1] = True  # a new block starts again from 0
    inside = starts < np.repeat(tokens, documents)
    if (starts[first_document] != 0).any() or not rising.all() or not inside.all():
        return "document starts"
    return ""


def read_frame(directory: Path, entry: ShardEntry, frame: Frame, number: int) -> bytes:
    """Read and decode one frame of a shard, or DataError with its place and the cause."""
    path = directory / entry.name
    place = f"frame {number} at byte {frame.compressed_offset:,}"
    try:
        # Opened for every frame: a corpus may have more shards than a process may have open files.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            data = os.pread(descriptor, frame.compressed_size, frame.compressed_offset)
        finally:
            os.close(descriptor)
        return decode_frame(data, frame)
    except FrameError as error:
        raise refusal(path, directory, f"{place} is damaged: {error}") from error
    except OSError as error:
        raise refusal(path, directory, f"{place} cannot be read ({error.strerror})") from error


def check_shard_size(directory: Path, entry: ShardEntry) -> None:
    """Refuse a shard that is missing or not as long as the manifest says."""
    path = directory / entry.name
    found = _size_of(path, directory)
    if found != entry.bytes:
        raise refusal(path, directory, f"is {found:,} bytes, expected {entry.bytes:,}")


def _size_of(path: Path, directory: Path) -> int:
    try:
        status = path.stat()
    except OSError as error:
        raise refusal(path, directory, f"cannot be opened ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode):
        raise refusal(path, directory, "is not a regular file")
    return status.st_size


def refusal(path: Path, directory: Path, problem: str) -> DataError:
    return DataError(
        f"{path} {problem}. The file was cut short, damaged, or swapped with another after it was "
        f"written. To list everything that is wrong: txl data verify {directory}"
    )
