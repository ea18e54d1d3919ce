"""Scan units read the input once to locate and hash every document; the index joins their results.

A scan holds no text: location, size and sha256 of every document, about 70 bytes per document on
disk. The index joins all scans in input order, as NumPy columns of 52 bytes per document, so an
input larger than RAM can be deduplicated, split and shuffled in one process. Lines count from the
start of a range in a scan, and from the start of the file in the index.
"""

import hashlib
import itertools
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save

from data_pipeline.errors import DataError, counted, printable
from data_pipeline.readers import (
    InputFile,
    Record,
    Reject,
    Source,
    read_records,
    scan_ranges,
)
from data_pipeline.shards.manifest import InputSummary

UNIT_BYTES = 64 * 2**20
MAX_RANGES_PER_UNIT = 4096
"""Maximum number of file ranges per unit. Limits the size of a unit of many small files."""
MAX_REJECTS = 1_000_000
"""Maximum number of rejects per unit. A reject takes up to 1 kB of RAM."""
DOCUMENT, EMPTY, REJECT = 0, 1, 2
RECORD = np.dtype(
    [
        ("range_index", "<u4"),  # the unit's file range that contains the record
        ("kind", "u1"),  # DOCUMENT, EMPTY or REJECT; for a reject, the fields below are 0
        ("location", "<u8", 3),  # offset, size, line
        ("text_bytes", "<u8"),  # UTF-8 bytes of the text
        ("text_sha256", "u1", 32),
    ]
)
_ROW = struct.Struct("<IB3QQ32s")  # the same layout, without padding


class FileRange(NamedTuple):
    """The bytes [start, stop) of one file. `number` is the position of the file in the input."""

    number: int
    file: InputFile
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ScanUnit:
    """File ranges that one worker scans."""

    number: int
    ranges: tuple[FileRange, ...]
    text_key: str

    @property
    def name(self) -> str:
        return f"input-{self.number:06d}.scan"  # the dot keeps it distinct from shard names

    @property
    def size(self) -> int:
        return sum(each.stop - each.start for each in self.ranges)

    @property
    def key(self) -> str:
        """Digest of everything that determines the result, except the content of the files."""
        ranges = [(each.number, each.file.name, each.start, each.stop) for each in self.ranges]
        # The row format is included so that a scan with other fields is not reused.
        content = json.dumps([_ROW.format, self.text_key, ranges])
        return hashlib.sha256(content.encode()).hexdigest()

    def __str__(self) -> str:
        others = len(self.ranges) - 1
        more = f" and {counted(others, 'more file')}" if others else ""
        first = self.ranges[0]
        return f"{self.name}, bytes {first.start:,} to {first.stop:,} of {first.file.name}{more}"


@dataclass(frozen=True, slots=True, eq=False)
class ScanResult:
    """The N records of a unit in input order, R of them rejects. The unit has F file ranges."""

    records: np.ndarray  # RECORD [N]
    range_lines: np.ndarray  # int64 [F]: number of lines in each file range
    rejects: tuple[Reject, ...]  # [R]
    keys: tuple[str, ...] = ()  # [N] `Record.key`, "" for rejects; () if there are none

    def to_bytes(self) -> bytes:
        fields = [(r.file, r.line, r.byte, r.reason, r.loses_rest) for r in self.rejects]
        rejects = np.frombuffer(json.dumps(fields).encode(), dtype=np.uint8)
        records = self.records.view(np.uint8)
        arrays = {"records": records, "range_lines": self.range_lines, "rejects": rejects}
        if self.keys:
            arrays["keys"] = np.frombuffer(json.dumps(self.keys).encode(), dtype=np.uint8)
        return save(arrays)

    @classmethod
    def load(cls, path: Path) -> "ScanResult":
        """Load a scan. `output.py` has checked its sha256."""
        arrays = load_file(path)
        rejects = json.loads(arrays["rejects"].tobytes())
        return cls(
            records=arrays["records"].view(RECORD),
            range_lines=arrays["range_lines"],
            rejects=tuple(Reject(*fields) for fields in rejects),
            keys=tuple(json.loads(arrays["keys"].tobytes())) if "keys" in arrays else (),
        )


def plan_scan(files: list[InputFile], text_key: str) -> list[ScanUnit]:
    """Divide the input into units of about UNIT_BYTES: ranges of large files, groups of small."""
    groups: list[list[FileRange]] = []
    room = 0
    for number, file in enumerate(files):
        for start, stop in scan_ranges(file, UNIT_BYTES):
            size = stop - start
            if not groups or size > room or len(groups[-1]) == MAX_RANGES_PER_UNIT:
                groups.append([])
                room = UNIT_BYTES
            groups[-1].append(FileRange(number, file, start, stop))
            room -= size
    return [ScanUnit(number, tuple(ranges), text_key) for number, ranges in enumerate(groups)]


def spill_name(number: int) -> str:
    """Name of the file with the texts of unit `number` that cannot be read from their input."""
    return f"spill-{number:06d}"


def scan(unit: ScanUnit, spill: BinaryIO | None = None) -> ScanResult:
    """Read a unit. Records that cannot be used become rejects.

    Texts of files that are spilled are written to `spill` if it is given; their locations then
    refer to it. Raises UnfinishedError when a disk or server fails temporarily, and DataError
    for more than MAX_REJECTS rejects: such an input has another format.
    """
    has_keys = any(each.file.kind == "tar" for each in unit.ranges)
    rows = bytearray()  # packed, because there may be millions
    range_lines: list[int] = []
    rejects: list[Reject] = []
    keys: list[str] = []
    for number, (_, file, start, stop) in enumerate(unit.ranges):
        source = Source(file, unit.text_key, start, stop, spill)
        last_line = 0
        for record in read_records(source):
            last_line = record.line
            if has_keys:
                keys.append("" if isinstance(record, Reject) else record.key)
            if isinstance(record, Reject):
                rejects.append(record)
                rows += _ROW.pack(number, REJECT, 0, 0, 0, 0, b"")
            else:
                rows += _row(number, record, spill if file.is_spilled else None)
            if len(rejects) > MAX_REJECTS:
                raise _too_many_rejects(file, rejects)
        # `source.lines` is 0 after a read error. The line numbers of the next range must still
        # differ from those of this range, because document ids are made of them.
        range_lines.append(source.lines or last_line)
    return ScanResult(
        records=np.frombuffer(rows, RECORD),
        range_lines=np.array(range_lines, dtype=np.int64),
        rejects=tuple(rejects),
        keys=tuple(keys),
    )


def _row(number: int, record: Record, spill: BinaryIO | None) -> bytes:
    """The row of a document. Its text is written to `spill` if given, unless it is there."""
    offset, size, text_bytes = record.offset, record.size, record.size
    if record.text is not None:
        encoded = record.text.encode()
        text_bytes = len(encoded)
        if spill:
            offset, size = spill.tell(), text_bytes
            spill.write(encoded)
    kind = DOCUMENT if text_bytes else EMPTY
    return _ROW.pack(number, kind, offset, size, record.line, text_bytes, record.sha256)


def _too_many_rejects(file: InputFile, rejects: list[Reject]) -> DataError:
    last = "".join(f"\n  {reject}" for reject in rejects[-MAX_SHOWN_REJECTS:])
    return DataError(
        f"{printable(file.name)}: more than {MAX_REJECTS:,} records cannot be used; the file is "
        f"probably not {file.kind}.{last}\nNo dataset was written. Set its format with --format, "
        "or remove the file from the input."
    )


# --- the index of all documents -------------------------------------------------------------------


TEXT_HASH_BYTES = 16
"""Bytes of a text's sha256 to keep. They identify duplicates and files that changed."""

_ROWS_PER_UPDATE = 8192
"""Records whose contribution to the digest is held in RAM."""
MAX_SHOWN_REJECTS = 5
"""Rejects kept in RAM for an error message. An input of another format has one per line."""


class InputIndex:
    """The D documents with text, numbered in input order, and counts of everything else.

    Rejects are written to `reject_list`, if it is given, as the lines of `rejects.jsonl`.
    """

    file: np.ndarray  # uint32 [D]: position in `files`
    # uint64 [D, 3]: offset, size, line. Lines count from the file's start; 0 is a whole file.
    location: np.ndarray
    text_bytes: np.ndarray  # uint64 [D]: UTF-8 bytes of the text
    text_hash: np.ndarray  # uint8 [D, TEXT_HASH_BYTES]: the first bytes of the text's sha256

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
        self.duplicates = 0  # set by `first_of_each_text`
        self.rejected = 0
        self.first_rejects: list[Reject] = []  # at most MAX_SHOWN_REJECTS
        self.broken: dict[str, Reject] = {}  # by file, the first that loses the rest of the file
        # Keys of documents in containers, "" for others; [] if no file has keys.
        self.keys: list[str] = []
        self._first_of_unit = np.zeros(len(units) + 1, np.int64)
        self._digest = hashlib.sha256()
        if any(splits := [file.split for file in files]):
            self._digest.update(json.dumps(splits).encode())
        self._reject_list = reject_list

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
        if any(file.kind == "tar" for file in self.files):
            self.keys = [""] * total
        file_lines = np.zeros(len(self.files), np.uint64)
        for number, unit in enumerate(self.units):
            rows = slice(self._first_of_unit[number], self._first_of_unit[number + 1])
            self._add_scan(unit, scans(number), rows, file_lines)

    def replace_only_document(self, parts: list[tuple[int, int, bytes]]) -> None:
        """Replace the only document by its parts: (start, stop, sha256), in bytes of its text."""
        offset, _, line = self.location[0].tolist()
        self._first_of_unit[self._first_of_unit > 0] = len(parts)
        self.file = np.repeat(self.file, len(parts))
        sizes = [stop - start for start, stop, _ in parts]
        places = [(offset + start, stop - start, line) for start, stop, _ in parts]
        self.location, self.text_bytes = np.array(places, np.uint64), np.array(sizes, np.uint64)
        self.keys = self.keys * len(parts)
        hashes = b"".join(sha256[:TEXT_HASH_BYTES] for *_, sha256 in parts)
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
        if reject.loses_rest:
            self.broken.setdefault(reject.file, reject)
        if self._reject_list:
            self._reject_list.write(line)
        return line


def document_id(name: str, line: int, key: str = "") -> str:
    """FILE:key for a document with a key, else FILE:line, or FILE if the document is the file."""
    return f"{name}:{key or line}" if line else name
