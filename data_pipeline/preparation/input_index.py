"""The input after one reading: where every document stands, what was rejected, one digest of all.

Put together from the scans of all units in input order, as columns: 52 bytes a document and no
text, so a index larger than memory can be ordered at will and read again document by document.
What is in a unit is `scan.py`'s business, which documents go where `shard_assignment.py`'s.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import BinaryIO

import numpy as np

from data_pipeline.preparation.scan import DOCUMENT, EMPTY, REJECT, Scan, ScanUnit
from data_pipeline.readers import InputFile, Reject
from data_pipeline.shards.manifest import InputSummary

CHECK_BYTES = 16
"""Of a text's sha256, kept to find duplicates and files that change between the readings."""

FIRST = 5
"""Rejects held for a message: input of another format has one for every line."""


class InputIndex:
    """Documents by number, in input order, and what else the input held.

    Rejects go to `reject_list`, if given, as the lines of `rejects.jsonl`; few are held.
    """

    def __init__(
        self,
        files: list[InputFile],
        units: Sequence[ScanUnit],
        reject_list: BinaryIO | None = None,
    ) -> None:
        self.files = files
        self.units = units
        self.text_key = units[0].text_key if units else "text"
        self.documents = 0
        """With text, as they stand in the input."""
        self.rejected = 0
        self.first_rejects: list[Reject] = []
        """FIRST at most."""
        self.broken_files = 0
        """Those with a Reject that loses the rest."""
        self.first_broken: list[Reject] = []
        """One of each of them, FIRST at most."""
        self.empty = 0
        self.duplicates = 0
        self.file = np.empty(0, np.uint32)
        self.place = np.empty((0, 3), np.uint64)
        """[D, 3]: offset, size, line; the line counts from the file's start, 0 for whole files."""
        self.text_bytes = np.empty(0, np.uint64)
        self.check = np.empty((0, CHECK_BYTES), np.uint8)
        self._first_of_unit = np.zeros(len(units) + 1, np.int64)
        self._digest = hashlib.sha256()
        self._reject_list = reject_list
        self._last_broken = ""

    def __len__(self) -> int:
        return len(self.file)

    def document_id(self, number: int) -> str:
        return document_id(self.files[self.file[number]].name, int(self.place[number, 2]))

    def document_ids(self) -> Iterator[str]:
        names = [file.name for file in self.files]
        for file, line in zip(self.file, self.place[:, 2], strict=True):
            yield document_id(names[file], int(line))

    def unit_of(self, numbers: np.ndarray) -> np.ndarray:
        """The scan unit that each of these documents is from."""
        return np.searchsorted(self._first_of_unit, numbers, side="right") - 1

    @property
    def digest(self) -> str:
        """Over every document's id and the sha256 of its text, and every reject."""
        return self._digest.hexdigest()

    def summary(self) -> InputSummary:
        return InputSummary(
            digest=self.digest,
            files=len(self.files),
            documents=self.documents,
            empty=self.empty,
            rejected=self.rejected,
            duplicates=self.duplicates,
        )

    def fill(self, scans: Callable[[int], Scan]) -> None:
        """Take all units in; `scans(number)` gives the scan of one, and is called twice for each.

        Twice, because columns that are made in their final size need no second copy.
        """
        counts = [int((scans(n).kind == DOCUMENT).sum()) for n in range(len(self.units))]
        np.cumsum(counts, out=self._first_of_unit[1:])
        self.documents = total = sum(counts)
        self.file = np.empty(total, np.uint32)
        self.place = np.empty((total, 3), np.uint64)
        self.text_bytes = np.empty(total, np.uint64)
        self.check = np.empty((total, CHECK_BYTES), np.uint8)
        lines = np.zeros(len(self.files), np.uint64)
        for number, unit in enumerate(self.units):
            here = slice(self._first_of_unit[number], self._first_of_unit[number + 1])
            self._take(unit, scans(number), here, lines)

    def cut_only_document(self, sizes: list[int], sha256: list[bytes]) -> None:
        """Have parts in place of the one document, one behind the other, of `sizes` bytes each."""
        offset, _, line = self.place[0].tolist()
        starts = offset + np.cumsum([0, *sizes[:-1]])
        self._first_of_unit[self._first_of_unit > 0] = len(sizes)
        self.file = np.repeat(self.file, len(sizes))
        self.place = np.array(
            [(start, size, line) for start, size in zip(starts, sizes, strict=True)], np.uint64
        )
        self.text_bytes = np.array(sizes, np.uint64)
        checks = b"".join(digest[:CHECK_BYTES] for digest in sha256)
        self.check = np.frombuffer(checks, np.uint8).reshape(-1, CHECK_BYTES)

    def _take(self, unit: ScanUnit, scan: Scan, here: slice, lines: np.ndarray) -> None:
        """Fill the rows `here`; `lines` [files] counts every file's lines before this unit."""
        file_of_part = np.array([part.number for part in unit.parts], np.uint32)
        lines_before = lines[file_of_part]
        np.add.at(lines, file_of_part, scan.part_lines.astype(np.uint64))
        place, file = scan.place.copy(), file_of_part[scan.part]
        has_line = place[:, 2] > 0
        place[has_line, 2] += lines_before[scan.part[has_line]]
        self._update_digest(scan, file, place, lines_before)
        kept = scan.kind == DOCUMENT
        self.empty += int((scan.kind == EMPTY).sum())
        self.file[here] = file[kept]
        self.place[here] = place[kept]
        self.text_bytes[here] = scan.text_bytes[kept]
        self.check[here] = scan.text_sha256[kept, :CHECK_BYTES]

    def _update_digest(
        self, scan: Scan, file: np.ndarray, place: np.ndarray, lines_before: np.ndarray
    ) -> None:
        rejects = iter(scan.rejects)
        hashes = scan.text_sha256.tobytes()
        rows = zip(scan.kind.tolist(), file.tolist(), place[:, 2].tolist(), strict=True)
        for row, (kind, number, line) in enumerate(rows):
            if kind == REJECT:
                found = next(rejects)
                shift = int(lines_before[scan.part[row]]) if found.line else 0
                reject = replace(found, line=found.line + shift)
                self._digest.update(b"rejected\0" + self._add(reject))
            else:
                id_ = document_id(self.files[number].name, line).encode()
                text = hashes[32 * row : 32 * row + 32]
                self._digest.update(b"document\0" + id_ + b"\0" + text + b"\n")

    def _add(self, reject: Reject) -> bytes:
        """Count and list a reject; its line."""
        line = reject.to_json().encode() + b"\n"
        self.rejected += 1
        self.first_rejects = [*self.first_rejects, reject][:FIRST]
        if reject.loses_rest and reject.file != self._last_broken:  # a file's stand together
            self._last_broken = reject.file
            self.broken_files += 1
            self.first_broken = [*self.first_broken, reject][:FIRST]
        if self._reject_list:
            self._reject_list.write(line)
        return line


def document_id(name: str, line: int) -> str:
    return f"{name}:{line}" if line else name


def first_of_each_text(index: InputIndex) -> np.ndarray:
    """The numbers of the documents whose text no earlier one has, rising; counts the others."""
    words = np.ascontiguousarray(index.check).view("<u8")
    order = np.lexsort((words[:, 1], words[:, 0]))  # stable: equal texts stay in input order
    repeats = np.zeros(len(order), bool)
    repeats[1:] = (words[order[1:]] == words[order[:-1]]).all(axis=1)
    kept = np.sort(order[~repeats])
    index.duplicates = len(index) - len(kept)
    return kept
