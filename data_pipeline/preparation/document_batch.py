"""Documents by their places: what a work unit is told of some documents, and their texts again.

A text comes in pieces, for a document may be larger than memory. Texts of files that cannot be read
again from the middle (compressed ones, Parquet, URLs) are in the spill file of the scan that read
them, as they are.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_pipeline.errors import DataError, UnfinishedError
from data_pipeline.preparation.finished_units import RECORDS
from data_pipeline.preparation.input_index import CHECK_BYTES, InputIndex, document_id
from data_pipeline.preparation.scan import spill_name
from data_pipeline.readers import InputFile, read_pieces
from data_pipeline.storage.urls import shown


@dataclass(frozen=True, slots=True, eq=False)
class DocumentBatch:
    """Where D documents stand, in order."""

    text_key: str
    files: tuple[InputFile, ...]
    """Those the documents are from."""
    file: np.ndarray
    """int64 [D]: which of `files`."""
    spill: np.ndarray
    """int64 [D]: the scan unit whose spill file holds the text, -1: it is in the file itself."""
    place: np.ndarray
    """uint64 [D, 3]: offset, size, line."""
    text_bytes: np.ndarray
    check: np.ndarray
    """uint8 [D, CHECK_BYTES] of the text's sha256."""

    @classmethod
    def of(cls, index: InputIndex, numbers: np.ndarray) -> "DocumentBatch":
        used, file = np.unique(index.file[numbers], return_inverse=True)
        files = tuple(index.files[place] for place in used.tolist())
        spilled = np.array([not each.rereadable for each in files], bool)[file]
        return cls(
            text_key=index.text_key,
            files=files,
            file=file,
            spill=np.where(spilled, index.unit_of(numbers), -1),
            place=index.place[numbers],
            text_bytes=index.text_bytes[numbers],
            check=index.check[numbers],
        )

    def __len__(self) -> int:
        return len(self.file)

    def __str__(self) -> str:
        more = f" and {len(self.files) - 1} more files" if len(self.files) > 1 else ""
        return f"{len(self):,} documents of {self.files[0].name}{more}"

    @property
    def size(self) -> int:
        """UTF-8 bytes of all texts."""
        return int(self.text_bytes.sum())

    def digest(self, about: object) -> str:
        """Of the places and of `about`, which JSON can write."""
        names = [file.name for file in self.files]
        digest = hashlib.sha256(json.dumps([about, self.text_key, names]).encode())
        for array in (self.file, self.spill, self.place, self.text_bytes, self.check):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def document_id(self, number: int) -> str:
        return document_id(self.files[self.file[number]].name, int(self.place[number, 2]))

    def texts(self, number: int, staging: Path) -> Iterator[str]:
        """A document's text in pieces.

        Raises DataError if it is not the one that was scanned, UnfinishedError if it cannot be read
        now, or the spill file is not as it was written.
        """
        file = self.files[self.file[number]]
        offset, size, line = self.place[number].tolist()
        unit = int(self.spill[number])
        spill = staging / RECORDS / spill_name(unit)
        where = file if unit < 0 else _spill_file(spill)
        changed = _changed(file) if unit < 0 else _unreadable(spill, "it is damaged")
        digest = hashlib.sha256()
        pieces = read_pieces(where, (offset, size, line), text_key=self.text_key)
        while True:
            try:
                text = next(pieces, None)
            except ValueError:
                raise changed from None
            except OSError as error:
                if unit < 0 and isinstance(error, FileNotFoundError):
                    raise changed from None
                raise _unreadable(where.path, error.strerror or type(error).__name__) from error
            if text is None:
                break
            digest.update(text.encode("utf-8", errors="replace"))
            yield text
        if digest.digest()[:CHECK_BYTES] != self.check[number].tobytes():
            raise changed


def _spill_file(path: Path) -> InputFile:
    return InputFile(path=str(path), name=path.name, kind="text", compression="", size=0)


def _changed(file: InputFile) -> DataError:
    return DataError(
        f"{shown(file.path)} changed while it was being read. Nothing was "
        "written; run this again when nobody writes to the input."
    )


def _unreadable(path: str | Path, reason: str) -> UnfinishedError:
    return UnfinishedError(
        f"{shown(str(path))} cannot be read again: {reason}. Finished work is kept; when the disk "
        "or network is well, the same command goes on from it."
    )
