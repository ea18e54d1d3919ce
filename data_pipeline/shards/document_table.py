"""The packed table of a shard's documents: first token and id of each.

A shard of sentences has millions of documents. Eight bytes per start and the full text of every id
would be several times the compressed text. Most ids are `file:line` with consecutive lines, and
starts increase by small steps. So each file name is stored once, lines and starts are stored as
differences, and everything is one zstd frame with a checksum: 1 to 2 bytes per sentence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from data_pipeline.shards.frames import FrameError, compress, decompress

MAX_TABLE_BYTES = 2**31
"""Larger tables are refused before decoding, whatever size a file declares."""
_NO_LINE = -1
_COLUMNS = ("starts", "file", "line", "names", "name_ends")


@dataclass(frozen=True, eq=False)
class DocumentTable:
    """D documents in shard order."""

    starts: NDArray[np.int64]
    """[D] first token, relative to its block's start."""
    file: NDArray[np.int64]
    """[D] index into `names`."""
    line: NDArray[np.int64]
    """[D] number after the name and a colon; -1 if the id is the name alone."""
    names: tuple[str, ...]

    def document_id(self, document: int) -> str:
        name, line = self.names[self.file[document]], self.line[document]
        return name if line == _NO_LINE else f"{name}:{line}"


@dataclass(frozen=True, slots=True, eq=False)
class DocumentIds:
    """The ids of D documents as columns: `names[file]`, and a colon and `line` unless it is 0."""

    names: Sequence[str]
    file: NDArray[np.int64]
    line: NDArray[np.int64]

    @classmethod
    def of(cls, ids: Sequence[str]) -> Self:
        return cls(ids, np.arange(len(ids)), np.zeros(len(ids), np.int64))

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, rows: slice) -> "DocumentIds":
        return DocumentIds(self.names, self.file[rows], self.line[rows])

    def id_of(self, number: int) -> str:
        name, line = self.names[self.file[number]], self.line[number]
        return f"{name}:{line}" if line else name


def pack_documents(starts: NDArray[np.int64], ids: Sequence[str]) -> bytes:
    """The packed table of documents with first tokens `starts` [D] and ids `ids` [D]."""
    return pack_document_ids(starts, [DocumentIds.of(ids)])


def pack_document_ids(starts: NDArray[np.int64], ids: Sequence[DocumentIds]) -> bytes:
    """As `pack_documents`, for the ids of consecutive documents as columns."""
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


def unpack_documents(data: bytes, *, num_documents: int) -> DocumentTable:
    """The inverse of `pack_documents`. Raises ValueError for other or damaged bytes."""
    try:
        columns = load(decompress(data, limit=MAX_TABLE_BYTES))
    except (FrameError, SafetensorError, KeyError, AttributeError) as error:
        raise ValueError(f"its document table cannot be read: {error}") from error
    if set(columns) != set(_COLUMNS) or any(x.ndim != 1 for x in columns.values()):
        raise ValueError(f"its document table has the columns {sorted(columns)}")
    starts, file, line = (_sums(columns[name]) for name in _COLUMNS[:3])
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
    return DocumentTable(starts, file, line, names)


def _number_names(ids: DocumentIds, number_of: dict[str, int]) -> NDArray[np.int64]:
    """int64 [2, D]: number of each document's name, and its line; adds new names to `number_of`.

    Names are numbered in the order in which they first appear.
    """
    keys = 2 * ids.file + (ids.line > 0)
    used, first, key_of = np.unique(keys, return_index=True, return_inverse=True)
    columns = np.empty((2, len(used)), np.int64)
    for key in np.argsort(first).tolist():
        file, has_line = divmod(int(used[key]), 2)
        # A name without a line may itself end in a colon and digits.
        name, line = (ids.names[file], 0) if has_line else _split_id(ids.names[file])
        columns[:, key] = number_of.setdefault(name, len(number_of)), line
    return np.stack([columns[0, key_of], np.where(ids.line > 0, ids.line, columns[1, key_of])])


def _split_id(id_: str) -> tuple[str, int]:
    name, colon, line = id_.rpartition(":")
    # Only numbers that int64 holds and that are printed in the same way: not "01".
    plain = line.isascii() and line.isdigit() and str(int(line[:18] or 0)) == line
    return (name, int(line)) if colon and plain else (id_, _NO_LINE)


def _steps(column: NDArray[np.int64]) -> NDArray[Any]:
    """Differences of consecutive entries, as int32 if they fit."""
    steps = np.diff(column, prepend=0)
    small = np.abs(steps).max(initial=0) < 2**31
    return steps.astype(np.int32) if small else steps


def _sums(steps: NDArray[Any]) -> NDArray[np.int64]:
    return np.cumsum(steps, dtype=np.int64)
