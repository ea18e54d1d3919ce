"""The index of the input: the results of all scans, joined in input order.

It has 56 bytes per document and no text, so an input larger than RAM can be deduplicated, split and
shuffled in one process. Its lines count from the start of the file.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import BinaryIO

import numpy as np

from data_pipeline.preparation.documents import TEXT_HASH_BYTES, Documents, document_id
from data_pipeline.preparation.scan import (
    DOCUMENT,
    EMPTY,
    MAX_SHOWN_REJECTS,
    REJECT,
    ScanResult,
    ScanUnit,
)
from data_pipeline.readers import InputFile, Reject
from data_pipeline.shards.manifest import InputSummary

_ROWS_PER_UPDATE = 8192
"""Records whose contribution to the digest is held in RAM."""


class InputIndex:
    """The documents with text, numbered in input order, and counts of everything else."""

    documents: Documents

    def __init__(
        self,
        files: list[InputFile],
        units: Sequence[ScanUnit],
        scans: Iterable[ScanResult],
        reject_list: BinaryIO,
    ) -> None:
        """`scans` are the results of `units`, in order.

        Rejects are written to `reject_list`, as the lines of `rejects.jsonl`.
        """
        self.files = files
        self.empty = self.rejected = 0
        self.duplicates = 0  # set by `first_of_each_text`
        self.first_rejects: list[Reject] = []  # at most MAX_SHOWN_REJECTS
        self.broken: dict[str, Reject] = {}  # by file, the first that loses the rest of the file
        self._reject_list = reject_list
        self._digest = hashlib.sha256()
        if any(splits := [file.split for file in files]):
            self._digest.update(json.dumps(splits).encode())
        file_lines = np.zeros(len(files), np.uint64)
        parts = [
            self._add_scan(unit, scan, file_lines) for unit, scan in zip(units, scans, strict=True)
        ]
        self.documents = Documents.joined(units[0].text_key, files, parts)
        self.num_documents = len(self.documents)  # also after the only one is cut

    @property
    def digest(self) -> str:
        """Digest of given splits, id and text's sha256 of every document, and every reject."""
        return self._digest.hexdigest()

    def summary(self) -> InputSummary:
        return InputSummary(
            digest=self.digest,
            files=len(self.files),
            documents=self.num_documents,
            empty=self.empty,
            rejected=self.rejected,
            duplicates=self.duplicates,
        )

    def _add_scan(self, unit: ScanUnit, scan: ScanResult, file_lines: np.ndarray) -> Documents:
        """The documents of one unit.

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
        return Documents(
            unit.text_key,
            self.files,
            file[is_document],
            np.full(int(is_document.sum()), unit.number, np.uint32),
            location[is_document],
            records["text_bytes"][is_document],
            records["text_sha256"][is_document, :TEXT_HASH_BYTES],
            tuple(itertools.compress(scan.keys, is_document.tolist())),
        )

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
                    line_of_list = reject.to_json().encode() + b"\n"
                    content.append(b"rejected\0" + line_of_list)
                    self._reject_list.write(line_of_list)
                    self.rejected += 1
                    self.first_rejects = [*self.first_rejects, reject][:MAX_SHOWN_REJECTS]
                    if reject.loses_rest:
                        self.broken.setdefault(reject.file, reject)
                else:
                    id_ = document_id(names[number], line, key).encode()
                    content.append(b"document\0%b\0%b\n" % (id_, digest))
            self._digest.update(b"".join(content))
