"""The documents of one work unit: their locations, and reading their texts again.

The scan writes texts that cannot be read from the middle of their file (compressed files, Parquet,
URLs) to a spill file in the staging directory, and they are read from there. Consecutive short
documents form a group, which is tokenized in one call.
"""

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_pipeline.errors import DataError, UnfinishedError, counted
from data_pipeline.preparation.output import RECORDS
from data_pipeline.preparation.scan import TEXT_HASH_BYTES, InputIndex, document_id, spill_name
from data_pipeline.readers import InputFile, read_text_chunks, text_of_stored
from data_pipeline.shards.shard_index import NO_LINE, DocumentIds
from data_pipeline.system.files import open_descriptor
from data_pipeline.system.progress import count_bytes
from data_pipeline.system.sources import shown
from data_pipeline.tokenizers.interface import MAX_PART_CHARS


@dataclass(frozen=True, slots=True)
class TextSource:
    """The file that a text is read from again: an input file or a spill file."""

    file: InputFile
    is_spill: bool

    @property
    def changed(self) -> DataError | UnfinishedError:
        """The error if the file does not hold the text that was scanned."""
        if self.is_spill:
            return _unreadable(self.file.path, "the file is damaged")
        return DataError(
            f"{shown(self.file.place)} changed while it was being read. Nothing was written. Run "
            "the command again when no other process writes to the input."
        )

    @contextlib.contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Turn the errors of a read into those of `DocumentBatch.read_text`."""
        try:
            yield
        except ValueError:
            raise self.changed from None
        except OSError as error:
            if not self.is_spill and isinstance(error, FileNotFoundError):
                raise self.changed from None
            reason = error.strerror or type(error).__name__
            raise _unreadable(self.file.path, reason) from error


@dataclass(frozen=True, slots=True, eq=False)
class DocumentBatch:
    """Locations and hashes of B documents, in order. Sent to workers instead of their texts."""

    text_key: str
    files: tuple[InputFile, ...]  # the files that contain the documents
    file: np.ndarray  # int64 [B]: position in `files`
    spill_unit: np.ndarray  # int64 [B]: scan unit with the text's spill file; -1: the input file
    location: np.ndarray  # uint64 [B, 3]: offset, size, line
    text_bytes: np.ndarray  # uint64 [B]
    text_hash: np.ndarray  # uint8 [B, TEXT_HASH_BYTES]: the first bytes of the text's sha256
    keys: tuple[str, ...] = ()  # [B] `Record.key`; () if no document has one

    @classmethod
    def of(cls, index: InputIndex, numbers: np.ndarray) -> "DocumentBatch":
        used, file = np.unique(index.file[numbers], return_inverse=True)
        files = tuple(index.files[position] for position in used.tolist())
        is_spilled = np.array([each.is_spilled for each in files], bool)[file]
        return cls(
            text_key=index.text_key,
            files=files,
            file=file,
            spill_unit=np.where(is_spilled, index.unit_of(numbers), -1),
            location=index.location[numbers],
            text_bytes=index.text_bytes[numbers],
            text_hash=index.text_hash[numbers],
            keys=tuple(index.keys[number] for number in numbers) if index.keys else (),
        )

    def __len__(self) -> int:
        return len(self.file)

    def __str__(self) -> str:
        others = len(self.files) - 1
        more = f" and {counted(others, 'more file')}" if others else ""
        return f"{counted(len(self), 'document')} of {self.files[0].name}{more}"

    @property
    def size(self) -> int:
        """UTF-8 bytes of all texts."""
        return int(self.text_bytes.sum())

    def digest(self, context: object) -> str:
        """Digest of the batch and of `context`, which must be JSON-serializable."""
        names = [file.name for file in self.files]
        digest = hashlib.sha256(json.dumps([context, self.text_key, names]).encode())
        arrays = (self.file, self.spill_unit, self.location, self.text_bytes, self.text_hash)
        for array in arrays:
            digest.update(array.tobytes())
        if self.keys:
            digest.update(json.dumps(self.keys).encode())
        return digest.hexdigest()

    def document_id(self, number: int) -> str:
        key = self.keys[number] if self.keys else ""
        return document_id(self.files[self.file[number]].name, int(self.location[number, 2]), key)

    def document_ids(self, rows: slice) -> DocumentIds:
        if self.keys:
            return DocumentIds.of([self.document_id(number) for number in range(len(self))[rows]])
        names = [file.name for file in self.files]
        line = self.location[rows, 2].astype(np.int64)
        return DocumentIds(names, self.file[rows], np.where(line > 0, line, NO_LINE))

    def source_of(self, number: int, staging: Path) -> TextSource:
        unit = int(self.spill_unit[number])
        if unit < 0:
            return TextSource(self.files[self.file[number]], is_spill=False)
        path = staging / RECORDS / spill_name(unit)
        spill = InputFile(str(path), path.name, kind="text")
        return TextSource(spill, is_spill=True)

    def read_text(self, number: int, staging: Path) -> Iterator[str]:
        """Yield the text of a document in consecutive fragments: it may be larger than RAM.

        Raises DataError if the text differs from the scanned one, and UnfinishedError if it cannot
        be read now or its spill file is damaged.
        """
        source = self.source_of(number, staging)
        offset, size, line = self.location[number].tolist()
        digest = hashlib.sha256()
        with source.explain_errors():
            chunks = read_text_chunks(source.file, (offset, size, line), text_key=self.text_key)
            for text in chunks:
                raw = text.encode("utf-8", errors="replace")
                digest.update(raw)
                count_bytes(len(raw))
                yield text
        # The last check, and the only one for a change that kept size and modification time.
        if digest.digest()[:TEXT_HASH_BYTES] != self.text_hash[number].tobytes():
            raise source.changed


def _unreadable(path: str | Path, reason: str) -> UnfinishedError:
    return UnfinishedError(
        f"{shown(str(path))} cannot be read again: {reason}. Finished work is kept. Repair the "
        "disk or network, then run the same command to continue."
    )


# --- groups of short documents --------------------------------------------------------------------


GROUP_BYTES = 2**20
"""Maximum stored bytes of a group."""
MAX_SHORT_BYTES = MAX_PART_CHARS
"""A longer document is not part of a group: its text may have to be cut into parts."""


@dataclass(frozen=True, slots=True, eq=False)
class TextGroup:
    """Consecutive documents of a batch, the first of them with number `first`."""

    first: int
    texts: list[str] | None
    """None: one long document. Use `DocumentBatch.read_text`."""


def read_groups(batch: DocumentBatch, staging: Path) -> Iterator[TextGroup]:
    """All documents of a batch in order. Raises as `DocumentBatch.read_text` does."""
    sizes = np.maximum(batch.location[:, 1], batch.text_bytes).astype(np.int64)
    ends, is_long = np.cumsum(sizes), sizes > MAX_SHORT_BYTES
    next_long = [*np.flatnonzero(is_long).tolist(), len(batch)]
    first = position = 0
    while first < len(batch):
        if is_long[first]:
            yield TextGroup(first, None)
            first, position = first + 1, position + 1
            continue
        limit = int(ends[first] - sizes[first]) + GROUP_BYTES
        stop = min(int(np.searchsorted(ends, limit, side="right")), next_long[position])
        yield TextGroup(first, _read_group(batch, first, stop, staging))
        first = stop


def _read_group(batch: DocumentBatch, first: int, stop: int, staging: Path) -> list[str]:
    texts: list[str] = []
    for start, end in _runs(batch, first, stop):
        source = batch.source_of(start, staging)
        file, places = source.file, batch.location[start:end, :2].tolist()
        with source.explain_errors(), open_descriptor(file.path) as descriptor:
            stored = [os.pread(descriptor, size, offset) for offset, size in places]
            run = [text_of_stored(file, raw, batch.text_key) for raw in stored]
            digests = [hashlib.sha256(text.encode()).digest()[:TEXT_HASH_BYTES] for text in run]
        # The last check, and the only one for a change that kept size and modification time.
        if b"".join(digests) != batch.text_hash[start:end].tobytes():
            raise source.changed
        texts += run
    return texts


def _runs(batch: DocumentBatch, first: int, stop: int) -> Iterator[tuple[int, int]]:
    """The documents [first, stop) as runs of documents that are read from the same file."""
    file, unit = batch.file[first:stop], batch.spill_unit[first:stop]
    differs = (file[1:] != file[:-1]) | (unit[1:] != unit[:-1])
    bounds = [first, *(np.flatnonzero(differs) + first + 1).tolist(), stop]
    return itertools.pairwise(bounds)
