"""Documents without their texts: locations and hashes as NumPy columns, and reading texts again.

A text is read from its place in the input, or from the spill file of the scan unit that copied it.
Consecutive short documents form a group, which is read and tokenized in one call.
"""

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data_pipeline.errors import DataError, UnfinishedError, counted
from data_pipeline.preparation.scan import spill_path
from data_pipeline.readers import InputFile, read_text_chunks, text_of_stored
from data_pipeline.shards.shard_index import NO_LINE, DocumentIds
from data_pipeline.system.files import open_descriptor
from data_pipeline.system.progress import count_bytes
from data_pipeline.system.sources import shown
from data_pipeline.tokenizers.interface import MAX_PART_CHARS

TEXT_HASH_BYTES = 16
"""Bytes of a text's sha256 to keep. They identify duplicates and files that changed."""
GROUP_BYTES = 2**20
"""About the maximum of the stored bytes of a group."""
MAX_SHORT_BYTES = MAX_PART_CHARS
"""A longer document is not part of a group: its text may have to be cut into parts."""
_COLUMNS = ("file", "unit", "location", "text_bytes", "text_hash")


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """D documents in order: 56 bytes each, sent to workers instead of their texts."""

    text_key: str
    files: Sequence[InputFile]
    file: np.ndarray  # uint32 [D]: position in `files`
    unit: np.ndarray  # uint32 [D]: scan unit, which names the spill file
    # uint64 [D, 3]: offset, size, line. Lines count from the file's start; 0 is a whole file.
    location: np.ndarray
    text_bytes: np.ndarray  # uint64 [D]: UTF-8 bytes of the text
    text_hash: np.ndarray  # uint8 [D, TEXT_HASH_BYTES]: the first bytes of the text's sha256
    keys: tuple[str, ...] = ()  # [D] `Record.key`; () if no document has one

    @classmethod
    def joined(
        cls, text_key: str, files: Sequence[InputFile], parts: Sequence["Documents"]
    ) -> "Documents":
        """All documents of the parts, which have the same files."""
        columns = {name: np.concatenate([getattr(p, name) for p in parts]) for name in _COLUMNS}
        has_keys = any(part.keys for part in parts)
        keys = (part.keys or itertools.repeat("", len(part)) for part in parts if has_keys)
        return cls(text_key, files, **columns, keys=tuple(itertools.chain(*keys)))

    def take(self, numbers: np.ndarray) -> "Documents":
        """These documents alone, with only their files."""
        used, file = np.unique(self.file[numbers], return_inverse=True)
        columns = {name: getattr(self, name)[numbers] for name in _COLUMNS}
        return Documents(
            self.text_key,
            tuple(self.files[position] for position in used.tolist()),
            **{**columns, "file": file.astype(np.uint32)},
            keys=tuple(self.keys[number] for number in numbers) if self.keys else (),
        )

    def cut(self, parts: list[tuple[int, int, bytes]]) -> "Documents":
        """The only document as its parts: (start, stop, sha256), in bytes of its text."""
        offset, _, line = self.location[0].tolist()
        places = [(offset + start, stop - start, line) for start, stop, _ in parts]
        location = np.array(places, np.uint64)
        hashes = b"".join(sha256[:TEXT_HASH_BYTES] for *_, sha256 in parts)
        return replace(
            self.take(np.zeros(len(parts), np.int64)),
            location=location,
            text_bytes=location[:, 1],
            text_hash=np.frombuffer(hashes, np.uint8).reshape(-1, TEXT_HASH_BYTES),
        )

    def __len__(self) -> int:
        return len(self.file)

    def __str__(self) -> str:
        return f"{counted(len(self), 'document')}, from {self.files[0].name} on"

    @property
    def size(self) -> int:
        """UTF-8 bytes of all texts."""
        return int(self.text_bytes.sum())

    def digest(self, context: object) -> str:
        """Digest of the documents and of `context`, which must be JSON-serializable."""
        names = [file.name for file in self.files]
        content = json.dumps([context, self.text_key, names, self.keys])
        digest = hashlib.sha256(content.encode())
        for name in _COLUMNS:
            digest.update(getattr(self, name).tobytes())
        return digest.hexdigest()

    def ids(self) -> Iterator[str]:
        names = [file.name for file in self.files]
        keys = self.keys or itertools.repeat("", len(self))
        for file, line, key in zip(self.file, self.location[:, 2], keys, strict=True):
            yield document_id(names[file], int(line), key)

    def document_id(self, number: int) -> str:
        return next(self.take(np.array([number])).ids())

    def stored_ids(self, rows: slice) -> DocumentIds:
        """The ids of some documents as a shard stores them."""
        if self.keys:
            return DocumentIds.of(list(self.take(np.arange(len(self))[rows]).ids()))
        names = [file.name for file in self.files]
        line = self.location[rows, 2].astype(np.int64)
        return DocumentIds(names, self.file[rows], np.where(line > 0, line, NO_LINE))

    def read_text(self, number: int, staging: Path) -> Iterator[str]:
        """Yield the text of a document in consecutive fragments: it may be larger than RAM.

        Raises DataError if the text differs from the scanned one, and UnfinishedError if it cannot
        be read now or its spill file is damaged.
        """
        offset, size, line = self.location[number].tolist()
        digest = hashlib.sha256()
        with self._file_of(number, staging) as file:
            for text in read_text_chunks(file, (offset, size, line), text_key=self.text_key):
                raw = text.encode("utf-8", errors="replace")
                digest.update(raw)
                count_bytes(len(raw))
                yield text
            self._require_hashes(digest.digest()[:TEXT_HASH_BYTES], number, number + 1)

    def _require_hashes(self, hashes: bytes, first: int, stop: int) -> None:
        """The last check, and the only one for a change that kept size and modification time."""
        if hashes != self.text_hash[first:stop].tobytes():
            raise ValueError("the text is another")

    @contextlib.contextmanager
    def _file_of(self, number: int, staging: Path) -> Iterator[InputFile]:
        """The file from which a text is read, whose errors become those of `read_text`."""
        file = self.files[self.file[number]]
        place = shown(file.place)
        if is_spilled := file.is_spilled:
            path = spill_path(staging, int(self.unit[number]))
            file, place = InputFile(str(path), path.name, kind="text"), str(path)
        try:
            yield file
        except (ValueError, OSError) as error:
            is_other = isinstance(error, ValueError | FileNotFoundError)
            if is_other and not is_spilled:
                raise DataError(
                    f"{place} changed while it was being read. Nothing was written. Run the "
                    "command again when no other process writes to the input."
                ) from None
            reason = "the file is damaged"
            if isinstance(error, OSError):
                reason = error.strerror or type(error).__name__
            raise UnfinishedError(
                f"{place} cannot be read again: {reason}. Finished work is kept. Repair the disk "
                "or network, then run the same command to continue."
            ) from error


def document_id(name: str, line: int, key: str = "") -> str:
    """FILE:key for a document with a key, else FILE:line, or FILE if the document is the file."""
    return f"{name}:{key or line}" if line else name


# --- groups of short documents --------------------------------------------------------------------


def read_groups(documents: Documents, staging: Path) -> Iterator[tuple[int, list[str] | None]]:
    """(number of the first document, texts) of groups of consecutive documents, in order.

    The texts are None for one long document: use `Documents.read_text`. Raises as that does.
    """
    sizes = np.maximum(documents.location[:, 1], documents.text_bytes).astype(np.int64)
    part, is_long = (np.cumsum(sizes) - sizes) // GROUP_BYTES, sizes > MAX_SHORT_BYTES
    begins = (part[1:] != part[:-1]) | is_long[1:] | is_long[:-1]
    bounds = [0, *(np.flatnonzero(begins) + 1).tolist(), len(documents)]
    for first, stop in itertools.pairwise(bounds):
        texts = None if is_long[first] else _read_group(documents, first, stop, staging)
        yield first, texts


def _read_group(documents: Documents, first: int, stop: int, staging: Path) -> list[str]:
    texts: list[str] = []
    places = documents.location[first:stop, :2].tolist()
    # Runs of documents that are read from the same file.
    file, unit = documents.file[first:stop], documents.unit[first:stop]
    changes = np.flatnonzero((file[1:] != file[:-1]) | (unit[1:] != unit[:-1])) + 1
    for start, end in itertools.pairwise([0, *changes.tolist(), stop - first]):
        with (
            documents._file_of(first + start, staging) as source,
            open_descriptor(source.path) as descriptor,
        ):
            run = [
                text_of_stored(source, os.pread(descriptor, size, offset), documents.text_key)
                for offset, size in places[start:end]
            ]
            digests = [hashlib.sha256(text.encode()).digest()[:TEXT_HASH_BYTES] for text in run]
            documents._require_hashes(b"".join(digests), first + start, first + end)
        texts += run
    return texts
