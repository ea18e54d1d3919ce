"""The index of the input: location and hash of every document, counts of rejects, one digest.

It joins the scans of all units in input order, as NumPy columns: 52 bytes per document and no text.
An input larger than memory can therefore be deduplicated, split and shuffled in one process, and
its documents read again one by one.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import BinaryIO

import numpy as np

from data_pipeline.preparation.scan import DOCUMENT, EMPTY, REJECT, ScanResult, ScanUnit
from data_pipeline.readers import InputFile, Reject
from data_pipeline.shards.manifest import InputSummary

TEXT_HASH_BYTES = 16
"""Bytes of a text's sha256 to keep. They identify duplicates and files that changed."""

_ROWS_PER_UPDATE = 8192
"""Records whose contribution to the digest is held in memory."""
MAX_SHOWN_REJECTS = 5
"""Rejects kept in memory for an error message. An input of another format has one per line."""


class InputIndex:
    """The D documents with text, numbered in input order, and counts of everything else.

    Rejects are written to `reject_list`, if it is given, as the lines of `rejects.jsonl`.
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
        self.documents = 0  # with text; differs from len(self) after `replace_only_document`
        self.empty = 0
        self.duplicates = 0  # set by `deduplicate.py`
        self.rejected = 0
        self.first_rejects: list[Reject] = []  # at most MAX_SHOWN_REJECTS
        self.broken_files = 0  # files with a Reject that loses the rest of the file
        self.first_broken: list[Reject] = []  # the first of each file, at most MAX_SHOWN_REJECTS
        self.file = np.empty(0, np.uint32)  # uint32 [D]: position in `files`
        # uint64 [D, 3]: offset, size, line. Lines count from the file's start; 0 is a whole file.
        self.location = np.empty((0, 3), np.uint64)
        self.text_bytes = np.empty(0, np.uint64)  # uint64 [D]: UTF-8 bytes of the text
        # uint8 [D, TEXT_HASH_BYTES]: the first bytes of the text's sha256.
        self.text_hash = np.empty((0, TEXT_HASH_BYTES), np.uint8)
        # Keys of documents in containers, "" for others; [] if no file has keys.
        self.keys: list[str] = []
        self._first_of_unit = np.zeros(len(units) + 1, np.int64)
        self._digest = hashlib.sha256()
        if any(splits := [file.split for file in files]):
            self._digest.update(json.dumps(splits).encode())
        self._reject_list = reject_list
        self._last_broken = ""

    def __len__(self) -> int:
        return len(self.file)

    def document_id(self, number: int) -> str:
        key = self.keys[number] if self.keys else ""
        return document_id(self.files[self.file[number]].name, int(self.location[number, 2]), key)

    def document_ids(self) -> Iterator[str]:
        names = [file.name for file in self.files]
        keys = self.keys or itertools.repeat("", len(self))
        for file, line, key in zip(self.file, self.location[:, 2], keys, strict=True):
            yield document_id(names[file], int(line), key)

    def unit_of(self, numbers: np.ndarray) -> np.ndarray:
        """The scan unit of each of these documents."""
        return np.searchsorted(self._first_of_unit, numbers, side="right") - 1

    @property
    def digest(self) -> str:
        """Digest of given splits, id and text's sha256 of every document, and every reject."""
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

    def fill(self, scans: Callable[[int], ScanResult]) -> None:
        """Add the results of all units. `scans(number)` is called twice per unit.

        The first pass counts documents, so that the columns are allocated once in their final size.
        """
        kinds = (scans(number).records["kind"] for number in range(len(self.units)))
        counts = [int((kind == DOCUMENT).sum()) for kind in kinds]
        np.cumsum(counts, out=self._first_of_unit[1:])
        self.documents = total = sum(counts)
        self.file = np.empty(total, np.uint32)
        self.location = np.empty((total, 3), np.uint64)
        self.text_bytes = np.empty(total, np.uint64)
        self.text_hash = np.empty((total, TEXT_HASH_BYTES), np.uint8)
        if any(file.has_keys for file in self.files):
            self.keys = [""] * total
        file_lines = np.zeros(len(self.files), np.uint64)
        for number, unit in enumerate(self.units):
            rows = slice(self._first_of_unit[number], self._first_of_unit[number + 1])
            self._add_scan(unit, scans(number), rows, file_lines)

    def replace_only_document(
        self, ranges: list[tuple[int, int]], text_bytes: list[int], sha256: list[bytes]
    ) -> None:
        """Replace the only document by consecutive parts of it, each (offset, size) of its file."""
        line = int(self.location[0, 2])
        self._first_of_unit[self._first_of_unit > 0] = len(ranges)
        self.file = np.repeat(self.file, len(ranges))
        self.location = np.array([(*each, line) for each in ranges], np.uint64)
        self.text_bytes = np.array(text_bytes, np.uint64)
        self.keys = self.keys * len(ranges)
        hashes = b"".join(digest[:TEXT_HASH_BYTES] for digest in sha256)
        self.text_hash = np.frombuffer(hashes, np.uint8).reshape(-1, TEXT_HASH_BYTES)

    def _add_scan(
        self, unit: ScanUnit, scan: ScanResult, rows: slice, file_lines: np.ndarray
    ) -> None:
        """Fill `rows` with the documents of one unit.

        `file_lines` is uint64 [files], the lines of each file in earlier units; it is updated.
        """
        file_of_range = np.array([each.number for each in unit.ranges], np.uint32)
        lines_before = file_lines[file_of_range]
        # np.add.at, because one file may have several ranges in the unit.
        np.add.at(file_lines, file_of_range, scan.range_lines.astype(np.uint64))
        records = scan.records
        location, file = records["location"].copy(), file_of_range[records["range_index"]]
        shift = lines_before[records["range_index"]]
        location[:, 2] += np.where(location[:, 2] > 0, shift, 0).astype(np.uint64)
        self._update_digest(scan, file, location, shift)
        self.empty += int((records["kind"] == EMPTY).sum())
        is_document = records["kind"] == DOCUMENT
        self.file[rows] = file[is_document]
        self.location[rows] = location[is_document]
        self.text_bytes[rows] = records["text_bytes"][is_document]
        self.text_hash[rows] = records["text_sha256"][is_document, :TEXT_HASH_BYTES]
        if scan.keys:
            self.keys[rows] = itertools.compress(scan.keys, is_document.tolist())

    def _update_digest(
        self, scan: ScanResult, file: np.ndarray, location: np.ndarray, shift: np.ndarray
    ) -> None:
        rejects = iter(scan.rejects)
        names = {number: self.files[number].name for number in np.unique(file).tolist()}
        keys = iter(scan.keys or itertools.repeat(""))
        for start in range(0, len(file), _ROWS_PER_UPDATE):
            rows = slice(start, start + _ROWS_PER_UPDATE)
            columns = (scan.records["kind"][rows], file[rows], location[rows, 2], shift[rows])
            sha256 = np.ascontiguousarray(scan.records["text_sha256"][rows]).view("V32")[:, 0]
            values = zip(*(column.tolist() for column in (*columns, sha256)), strict=True)
            content = []
            # `values` first: zip must not take a key after the last value.
            for (kind, number, line, lines_before, digest), key in zip(values, keys, strict=False):
                if kind == REJECT:
                    reject = next(rejects)
                    if reject.line:
                        reject = replace(reject, line=reject.line + lines_before)
                    content.append(b"rejected\0" + self._add_reject(reject))
                else:
                    id_ = document_id(names[number], line, key).encode()
                    content.append(b"document\0%b\0%b\n" % (id_, digest))
            self._digest.update(b"".join(content))

    def _add_reject(self, reject: Reject) -> bytes:
        """Count a reject and write it to the reject list. Return its line."""
        line = reject.to_json().encode() + b"\n"
        self.rejected += 1
        self.first_rejects = [*self.first_rejects, reject][:MAX_SHOWN_REJECTS]
        # The rejects of one file are consecutive: the last name is enough to count files.
        if reject.loses_rest and reject.file != self._last_broken:
            self._last_broken = reject.file
            self.broken_files += 1
            self.first_broken = [*self.first_broken, reject][:MAX_SHOWN_REJECTS]
        if self._reject_list:
            self._reject_list.write(line)
        return line


def document_id(name: str, line: int, key: str = "") -> str:
    """FILE:key for a document with a key, else FILE:line, or FILE if the document is the file."""
    return f"{name}:{key or line}" if line else name
