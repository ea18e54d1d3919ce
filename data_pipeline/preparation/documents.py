"""Documents without their texts: locations and hashes as NumPy columns, and reading the texts.

A text is read from the file to which its scan unit copied it, in staging. Consecutive short
documents form a group, which is read and tokenized in one call.
"""

import codecs
import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data_pipeline.errors import UnfinishedError, counted
from data_pipeline.shards.shard_index import NO_LINE, DocumentIds
from data_pipeline.system.files import open_descriptor
from data_pipeline.system.sources import count_bytes
from data_pipeline.tokenizers.interface import MAX_PART_CHARS

RECORDS = "units"
"""Directory in staging for files that are not part of the dataset."""
TEXT_HASH_BYTES = 16
"""Bytes of a text's sha256 to keep. They identify duplicates and texts that were damaged."""
CHUNK_BYTES = 2**20
GROUP_BYTES = 2**20
"""About the maximum of the UTF-8 bytes of a group."""
MAX_SHORT_BYTES = MAX_PART_CHARS
"""A longer document is not part of a group: its text may have to be cut into parts."""
_COLUMNS = ("file", "unit", "offset", "line", "text_bytes", "text_hash")


def texts_path(staging: Path, unit: int) -> Path:
    """The file with the texts of the documents of a scan unit."""
    return staging / RECORDS / f"texts-{unit:06d}"


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """D documents in order: 48 bytes each, sent to workers instead of their texts."""

    names: Sequence[str]  # of the files
    file: np.ndarray  # uint32 [D]: position in `names`
    unit: np.ndarray  # uint32 [D]: scan unit, which names the file with the text
    offset: np.ndarray  # uint64 [D]: of the text there
    line: np.ndarray  # uint64 [D]: counted from the file's start; 0 is a whole file
    text_bytes: np.ndarray  # uint64 [D]: UTF-8 bytes of the text
    text_hash: np.ndarray  # uint8 [D, TEXT_HASH_BYTES]: the first bytes of the text's sha256
    keys: tuple[str, ...] = ()  # [D] `Record.key`; () if no document has one

    @classmethod
    def joined(cls, names: Sequence[str], parts: Sequence["Documents"]) -> "Documents":
        columns = {name: np.concatenate([getattr(p, name) for p in parts]) for name in _COLUMNS}
        has_keys = any(part.keys for part in parts)
        keys = (part.keys or itertools.repeat("", len(part)) for part in parts if has_keys)
        return cls(names, **columns, keys=tuple(itertools.chain(*keys)))

    def take(self, numbers: np.ndarray) -> "Documents":
        """These documents alone, with only their files."""
        used, file = np.unique(self.file[numbers], return_inverse=True)
        columns = {name: getattr(self, name)[numbers] for name in _COLUMNS}
        return Documents(
            tuple(self.names[position] for position in used.tolist()),
            **{**columns, "file": file.astype(np.uint32)},
            keys=tuple(self.keys[number] for number in numbers) if self.keys else (),
        )

    def cut(self, parts: list[tuple[int, int, bytes]]) -> "Documents":
        """The only document as its parts: (start, stop, sha256), in bytes of its text."""
        bounds = np.array([(start, stop) for start, stop, _ in parts], np.uint64)
        hashes = b"".join(sha256[:TEXT_HASH_BYTES] for *_, sha256 in parts)
        return replace(
            self.take(np.zeros(len(parts), np.int64)),
            offset=self.offset + bounds[:, 0],
            text_bytes=bounds[:, 1] - bounds[:, 0],
            text_hash=np.frombuffer(hashes, np.uint8).reshape(-1, TEXT_HASH_BYTES),
        )

    def __len__(self) -> int:
        return len(self.file)

    def __str__(self) -> str:
        return f"{counted(len(self), 'document')}, from {self.names[0]} on"

    @property
    def size(self) -> int:
        """UTF-8 bytes of all texts."""
        return int(self.text_bytes.sum())

    def digest(self, context: object) -> str:
        """Digest of the documents and of `context`, which must be JSON-serializable."""
        content = json.dumps([context, list(self.names), self.keys])
        digest = hashlib.sha256(content.encode())
        for name in _COLUMNS:
            digest.update(getattr(self, name).tobytes())
        return digest.hexdigest()

    def ids(self) -> Iterator[str]:
        keys = self.keys or itertools.repeat("", len(self))
        for file, line, key in zip(self.file, self.line, keys, strict=True):
            yield document_id(self.names[file], int(line), key)

    def document_id(self, number: int) -> str:
        return next(self.take(np.array([number])).ids())

    def stored_ids(self, rows: slice) -> DocumentIds:
        """The ids of some documents as a shard stores them."""
        if self.keys:
            return DocumentIds.of(list(self.take(np.arange(len(self))[rows]).ids()))
        line = self.line[rows].astype(np.int64)
        return DocumentIds(self.names, self.file[rows], np.where(line > 0, line, NO_LINE))

    def read_text(self, number: int, staging: Path) -> Iterator[str]:
        """Yield the text of a document in consecutive fragments: it may be larger than RAM.

        Raises UnfinishedError if the text cannot be read or is not the scanned one.
        """
        digest = hashlib.sha256()

        def chunks(descriptor: int) -> Iterator[bytes]:
            offset, left = int(self.offset[number]), int(self.text_bytes[number])
            while left and (raw := os.pread(descriptor, min(CHUNK_BYTES, left), offset)):
                digest.update(raw)
                count_bytes(len(raw))
                yield raw
                offset, left = offset + len(raw), left - len(raw)

        with self._texts_of(number, staging) as descriptor:
            yield from codecs.iterdecode(chunks(descriptor), "utf-8")
            self._require_hashes(digest.digest()[:TEXT_HASH_BYTES], number, number + 1)

    def read_texts(self, first: int, stop: int, staging: Path) -> list[str]:
        """The texts of consecutive documents. Raises as `read_text`."""
        texts: list[str] = []
        # Runs of documents with the same file of texts.
        changes = np.flatnonzero(np.diff(self.unit[first:stop])) + 1
        for begin, end in itertools.pairwise([0, *changes.tolist(), stop - first]):
            rows = slice(first + begin, first + end)
            places = zip(self.text_bytes[rows].tolist(), self.offset[rows].tolist(), strict=True)
            with self._texts_of(rows.start, staging) as descriptor:
                raws = [os.pread(descriptor, size, offset) for size, offset in places]
                digests = [hashlib.sha256(raw).digest()[:TEXT_HASH_BYTES] for raw in raws]
                self._require_hashes(b"".join(digests), rows.start, rows.stop)
                texts += [raw.decode() for raw in raws]
        return texts

    def mapped_text(self, staging: Path) -> np.ndarray:
        """uint8 [size]: the only document's text, mapped from the disk. Raises as `read_text`."""
        for _ in self.read_text(0, staging):  # reading a damaged disk through a map is a signal
            pass
        path = texts_path(staging, int(self.unit[0]))
        return np.memmap(path, np.uint8, "r", int(self.offset[0]), (self.size,))

    def _require_hashes(self, hashes: bytes, first: int, stop: int) -> None:
        if hashes != self.text_hash[first:stop].tobytes():
            raise ValueError("the text is another")

    @contextlib.contextmanager
    def _texts_of(self, number: int, staging: Path) -> Iterator[int]:
        """The open file with the text of a document. Errors become those of `read_text`."""
        path = texts_path(staging, int(self.unit[number]))
        try:
            with open_descriptor(path) as descriptor:
                yield descriptor
        except (ValueError, OSError) as error:
            reason = (
                "the file is damaged"
                if isinstance(error, ValueError)
                else error.strerror or type(error).__name__
            )
            raise UnfinishedError(
                f"{path} cannot be read again: {reason}. Finished work is kept. Repair the disk "
                "or network, then run the same command to continue."
            ) from error


def document_id(name: str, line: int, key: str = "") -> str:
    """FILE:key for a document with a key, else FILE:line, or FILE if the document is the file."""
    return f"{name}:{key or line}" if line else name


def read_groups(documents: Documents, staging: Path) -> Iterator[tuple[int, list[str] | None]]:
    """(number of the first document, texts) of groups of consecutive documents, in order.

    The texts are None for one long document: use `Documents.read_text`. Raises as that does.
    """
    sizes = documents.text_bytes.astype(np.int64)
    part, is_long = (np.cumsum(sizes) - sizes) // GROUP_BYTES, sizes > MAX_SHORT_BYTES
    begins = (part[1:] != part[:-1]) | is_long[1:] | is_long[:-1]
    bounds = [0, *(np.flatnonzero(begins) + 1).tolist(), len(documents)]
    for first, stop in itertools.pairwise(bounds):
        texts = None if is_long[first] else documents.read_texts(first, stop, staging)
        yield first, texts
