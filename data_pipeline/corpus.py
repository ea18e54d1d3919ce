"""The corpus after one reading: where every document stands, what was rejected, one digest of all.

It keeps 40 bytes per document and no text, so a corpus larger than memory can be ordered at will
and read again document by document. Taking records out of files is `documents.py`'s business.
"""

import contextlib
import hashlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data_pipeline.documents import (
    InputFile,
    Record,
    Reject,
    printable,
    read_again,
    read_records,
)
from data_pipeline.errors import DataError
from data_pipeline.manifest import InputSummary

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
                text = read_again(file, text_key, place)
                same = _check(hashlib.sha256(text.encode("utf-8")).digest()) == self.check[number]
            except (OSError, ValueError):
                same = False
            if not same:
                raise DataError(
                    f"{printable(str(file.path))} changed while it was being read. Nothing was "
                    "written; run this again when nobody writes to the corpus."
                )
            yield number, text

    def _add(self, file: int, record: Record, check: int) -> None:
        self.file.append(file)
        self.offset.append(record.offset)
        self.size.append(record.size)
        self.line.append(record.line)
        self.check.append(check)


def scan_corpus(files: list[InputFile], text_key: str, progress: Progress) -> Corpus:
    """Read every record once. What cannot be used is in `rejects`, never an exception."""
    corpus, digest = Corpus(files), hashlib.sha256()
    sizes = [_size(file.path) for file in files]
    total, before = sum(sizes), 0
    for number, (file, size) in enumerate(zip(files, sizes, strict=True)):
        for record in read_records(file, text_key):
            if isinstance(record, Reject):
                corpus.rejects.append(record)
                digest.update(b"rejected\0" + record.to_json().encode() + b"\n")
                continue
            progress("reading", before + record.offset, total)
            text_sha256 = hashlib.sha256(record.text.encode("utf-8")).digest()
            id_ = _document_id(file, record.line)
            digest.update(b"document\0" + id_.encode() + b"\0" + text_sha256 + b"\n")
            if record.text:
                corpus._add(number, record, _check(text_sha256))
            else:
                corpus.empty += 1
        before += size
    progress("reading", total, total)
    corpus.digest = digest.hexdigest()
    return corpus


def _document_id(file: InputFile, line: int) -> str:
    return f"{file.name}:{line}" if line else file.name


def _check(sha256: bytes) -> int:
    return int.from_bytes(sha256[:8], "little")


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
