"""The documents of a shard, packed: where each starts and what it is called.

Sentences are documents too, and a shard has millions of them: eight bytes for a start and an id
spelled out would be several times the compressed text. Most ids are `file:line` with the line one
up from the last, and starts are small steps; so names are kept once, lines and starts as steps, and
all of it is one zstd frame with a checksum.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from data_pipeline.shards.frames import FrameError, compress, decompress

MAX_TABLE_BYTES = 2**31
"""No table decodes to more than this, whatever a file claims."""
_NO_LINE = -1
_COLUMNS = ("starts", "file", "line", "names", "name_ends")


@dataclass(frozen=True, eq=False)
class DocumentTable:
    """D documents in the order of their shard."""

    starts: NDArray[np.int64]
    """[D] first token, from its block's start."""
    file: NDArray[np.int64]
    """[D] which of `names`."""
    line: NDArray[np.int64]
    """[D] what follows the name and a colon; -1 if nothing does."""
    names: tuple[str, ...]

    def document_id(self, document: int) -> str:
        name, line = self.names[self.file[document]], self.line[document]
        return name if line == _NO_LINE else f"{name}:{line}"


def pack_documents(starts: NDArray[np.int64], ids: list[str]) -> bytes:
    """The table of documents that begin at `starts` [D] and are called `ids`."""
    number_of: dict[str, int] = {}
    split = [_split_id(id_) for id_ in ids]
    file = [number_of.setdefault(name, len(number_of)) for name, _ in split]
    names = [name.encode("utf-8") for name in number_of]
    columns = {
        "starts": _steps(np.asarray(starts, np.int64)),
        "file": _steps(np.array(file, np.int64)),
        "line": _steps(np.array([line for _, line in split], np.int64)),
        "names": np.frombuffer(b"".join(names), np.uint8),
        "name_ends": np.cumsum([len(name) for name in names], dtype=np.int64),
    }
    return compress(save(columns))


def unpack_documents(data: bytes, *, num_documents: int) -> DocumentTable:
    """What `pack_documents` packed. Raises ValueError for anything else."""
    try:
        columns = load(decompress(data, limit=MAX_TABLE_BYTES))
    except (FrameError, SafetensorError, KeyError, AttributeError) as error:
        raise ValueError(f"its table of documents cannot be read: {error}") from error
    if set(columns) != set(_COLUMNS) or any(x.ndim != 1 for x in columns.values()):
        raise ValueError(f"its table of documents has the columns {sorted(columns)}")
    starts, file, line = (_sums(columns[name]) for name in _COLUMNS[:3])
    ends = columns["name_ends"].astype(np.int64)
    content = columns["names"].tobytes()
    rising = np.diff(np.concatenate([[0], ends, [len(content)]]))
    if {len(starts), len(file), len(line)} != {num_documents} or (rising < 0).any():
        raise ValueError(f"its table is not of {num_documents:,} documents")
    if num_documents and not 0 <= file.min() <= file.max() < len(ends):
        raise ValueError("its table names files that it does not list")
    first = np.concatenate([[0], ends[:-1]])[: len(ends)]
    pieces = (content[low:high] for low, high in zip(first, ends, strict=True))
    names = tuple(piece.decode("utf-8", errors="replace") for piece in pieces)
    return DocumentTable(starts, file, line, names)


def _split_id(id_: str) -> tuple[str, int]:
    name, colon, line = id_.rpartition(":")
    plain = line.isascii() and line.isdigit() and str(int(line[:18] or 0)) == line
    return (name, int(line)) if colon and plain else (id_, _NO_LINE)


def _steps(column: NDArray[np.int64]) -> NDArray[Any]:
    """Differences to the entry before, as narrow as they allow."""
    steps = np.diff(column, prepend=0)
    small = np.abs(steps).max(initial=0) < 2**31
    return steps.astype(np.int32) if small else steps


def _sums(steps: NDArray[Any]) -> NDArray[np.int64]:
    return np.cumsum(steps, dtype=np.int64)
