"""The corpus after one reading: where every document stands, what was rejected, one digest of all.

It keeps 40 bytes per document and no text, so a corpus larger than memory can be ordered at will
and read again document by document. Taking records out of files is `readers`' business;
the texts of files that cannot be read again from the middle are kept in a temporary file.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.manifest import InputSummary
from data_pipeline.readers import (
    InputFile,
    Record,
    Reject,
    read_again,
    read_records,
    shown,
)

Progress = Callable[[str, int, int], None]
"""progress(what, done bytes, total bytes), called often."""


def _column() -> "array[int]":
    return array("Q")


@dataclass(slots=True)
class Corpus:
    """Documents by number, in input order."""

    files: list[InputFile]
    file: "array[int]" = field(default_factory=_column)
    offset: "array[int]" = field(default_factory=_column)
    size: "array[int]" = field(default_factory=_column)
    line: "array[int]" = field(default_factory=_column)
    check: "array[int]" = field(default_factory=_column)
    """First 8 bytes of the text's sha256: notices a file that changes between the passes."""
    kept: BinaryIO | None = None
    """The texts of files that are not rereadable, one behind the other; their places are in it."""
    rejects: list[Reject] = field(default_factory=list)
    empty: int = 0
    digest: str = ""

    def __len__(self) -> int:
        return len(self.file)

    def document_id(self, number: int) -> str:
        return _document_id(self.files[self.file[number]], self.line[number])

    def summary(self) -> InputSummary:
        return InputSummary(
            digest=self.digest,
            files=len(self.files),
            documents=len(self),
            empty=self.empty,
            rejected=len(self.rejects),
        )

    def reject_list(self) -> bytes:
        """The content of `rejects.jsonl`."""
        return "".join(reject.to_json() + "\n" for reject in self.rejects).encode()

    def texts(self, numbers: np.ndarray, text_key: str) -> Iterator[tuple[int, str]]:
        """(number, text) of these documents, read again.

        Raises DataError when a text is not the one of the first reading.
        """
        for number in map(int, numbers):
            file = self.files[self.file[number]]
            place = self.offset[number], self.size[number], self.line[number]
            try:
                if file.rereadable:
                    text = read_again(file, text_key, place)
                else:
                    text = self._read_kept(place[0], place[1])
                same = _check(hashlib.sha256(text.encode("utf-8")).digest()) == self.check[number]
            except (OSError, ValueError):
                same = False
            if not same:
                raise DataError(
                    f"{shown(file.path)} changed while it was being read. Nothing was "
                    "written; run this again when nobody writes to the corpus."
                )
            yield number, text

    def _read_kept(self, offset: int, size: int) -> str:
        assert self.kept
        self.kept.seek(offset)
        return self.kept.read(size).decode("utf-8")

    def _add(self, file: int, record: Record, check: int) -> None:
        offset, size = record.offset, record.size
        if self.kept and record.text is not None and not self.files[file].rereadable:
            offset, size = self.kept.tell(), self.kept.write(record.text.encode("utf-8"))
        self.file.append(file)
        self.offset.append(offset)
        self.size.append(size)
        self.line.append(record.line)
        self.check.append(check)


def scan_corpus(
    files: list[InputFile], text_key: str, progress: Progress, *, kept: BinaryIO | None
) -> Corpus:
    """Read every record once. What cannot be used is in `rejects`, never an exception.

    `kept` is a temporary file for the texts of files that are not rereadable, if there are any.
    """
    corpus, digest = Corpus(files, kept=kept), hashlib.sha256()
    total, before = sum(file.size for file in files), 0
    for number, file in enumerate(files):
        for record in read_records(file, text_key, 0, file.size):
            if isinstance(record, Reject):
                corpus.rejects.append(record)
                digest.update(b"rejected\0" + record.to_json().encode() + b"\n")
                continue
            progress("reading", before + min(record.offset, file.size), total)
            id_ = _document_id(file, record.line)
            digest.update(b"document\0" + id_.encode() + b"\0" + record.sha256 + b"\n")
            if record.text != "":
                corpus._add(number, record, _check(record.sha256))
            else:
                corpus.empty += 1
        before += file.size
    progress("reading", total, total)
    corpus.digest = digest.hexdigest()
    return corpus


def _document_id(file: InputFile, line: int) -> str:
    return f"{file.name}:{line}" if line else file.name


def _check(sha256: bytes) -> int:
    return int.from_bytes(sha256[:8], "little")
