"""Scan units: ranges of the input files, read once to locate and hash every document.

The result of a scan unit depends on the input alone. It holds arrays and no text: location, size
and sha256 of every document, about 70 bytes per document on disk. The reader computes the sha256 of
a text while it reads the text (`Record.sha256` in `data_pipeline/readers`). Line numbers count from
the start of a range; `input_index.py` adds the lines of the ranges before it.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from safetensors.numpy import load_file, save

from data_pipeline.errors import DataError, printable
from data_pipeline.readers import (
    InputFile,
    Record,
    RecordBlock,
    Reject,
    read_records,
    scan_ranges,
)

UNIT_BYTES = 64 * 2**20
MAX_RANGES_PER_UNIT = 4096
"""Maximum number of file ranges per unit. Limits the size of a unit of many small files."""
MAX_REJECTS = 1_000_000
"""Maximum number of rejects per unit. A reject takes up to 1 kB of memory."""
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


@dataclass(frozen=True, slots=True)
class FileRange:
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
        more = f" and {len(self.ranges) - 1} more files" if len(self.ranges) > 1 else ""
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
        """Load a scan. `finished_units.py` has checked its sha256."""
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
    groups = _group(_file_ranges(files))
    return [ScanUnit(number, ranges, text_key) for number, ranges in enumerate(groups)]


def _file_ranges(files: list[InputFile]) -> Iterator[FileRange]:
    for number, file in enumerate(files):
        for start, stop in scan_ranges(file, UNIT_BYTES):
            yield FileRange(number, file, start, stop)


def _group(ranges: Iterable[FileRange]) -> Iterator[tuple[FileRange, ...]]:
    group: list[FileRange] = []
    group_bytes = 0
    for each in ranges:
        size = each.stop - each.start
        if group and (group_bytes + size > UNIT_BYTES or len(group) == MAX_RANGES_PER_UNIT):
            yield tuple(group)
            group, group_bytes = [], 0
        group.append(each)
        group_bytes += size
    if group:
        yield tuple(group)


def spill_name(number: int) -> str:
    """Name of the file with the texts of unit `number` that cannot be read from their input."""
    return f"spill-{number:06d}"


def scan(unit: ScanUnit, spill: BinaryIO | None = None) -> ScanResult:
    """Read a unit. Records that cannot be used become rejects.

    Texts of files that are not rereadable are written to `spill` if it is given; their locations
    then refer to it. Raises UnfinishedError when a disk or server fails temporarily, and DataError
    for more than MAX_REJECTS rejects: such an input has another format.
    """
    # Packed bytes instead of a Python object per record: a unit may have millions of records.
    rows, rejects, range_lines = bytearray(), list[Reject](), list[int]()
    keys: list[str] = []
    has_keys = any(each.file.has_keys for each in unit.ranges)
    for range_index, each in enumerate(unit.ranges):
        target = None if each.file.rereadable else spill
        reading = read_records(each.file, unit.text_key, each.start, each.stop)
        last_line = 0
        for record in reading.blocks():
            if isinstance(record, RecordBlock):
                last_line = record.lines[-1]
                rows += _locate_block(record, range_index, target)
                keys += [""] * len(record.texts) if has_keys else []
                continue
            last_line = record.line
            if has_keys:
                keys.append("" if isinstance(record, Reject) else record.key)
            if isinstance(record, Reject):
                rejects.append(record)
                if len(rejects) > MAX_REJECTS:
                    raise _too_many_rejects(each, rejects)
                rows += _ROW.pack(range_index, REJECT, 0, 0, 0, 0, b"")
                continue
            offset, size, text_bytes = _locate(record, target)
            kind = DOCUMENT if text_bytes else EMPTY
            location = (offset, size, record.line)
            rows += _ROW.pack(range_index, kind, *location, text_bytes, record.sha256)
        # `reading.lines` is 0 after a read error. The line numbers of the next range must still
        # differ from those of this range, because document ids are made of them.
        range_lines.append(reading.lines or last_line)
    return ScanResult(
        records=np.frombuffer(rows, RECORD),
        range_lines=np.array(range_lines, dtype=np.int64),
        rejects=tuple(rejects),
        keys=tuple(keys),
    )


def _too_many_rejects(file_range: FileRange, rejects: list[Reject]) -> DataError:
    file = file_range.file
    shown = "".join(f"\n  {reject}" for reject in rejects[:5])
    return DataError(
        f"{printable(file.name)}: more than {MAX_REJECTS:,} records near byte "
        f"{file_range.start:,} cannot be used; the file is probably not {file.kind}.{shown}\n"
        "No dataset was written. Set its format with --format, or remove the file from the input."
    )


def _locate_block(block: RecordBlock, range_index: int, spill: BinaryIO | None) -> bytes:
    """The rows of all documents of a block. Offsets refer to `spill` if given."""
    rows = np.zeros(len(block.texts), RECORD)
    sizes = np.fromiter(map(len, block.texts), np.uint64, len(rows))
    offsets = np.array(block.offsets, np.uint64)
    if spill is not None:
        offsets = np.uint64(spill.tell()) + np.cumsum(sizes) - sizes
        spill.write(b"".join(block.texts))
    rows["range_index"], rows["kind"], rows["text_bytes"] = range_index, DOCUMENT, sizes
    rows["location"] = np.stack([offsets, sizes, np.array(block.lines, np.uint64)], axis=1)
    digests = b"".join([hashlib.sha256(text).digest() for text in block.texts])
    rows["text_sha256"] = np.frombuffer(digests, np.uint8).reshape(-1, 32)
    return rows.tobytes()


def _locate(record: Record, spill: BinaryIO | None) -> tuple[int, int, int]:
    """Return (offset, size, UTF-8 bytes of the text). Offset and size refer to `spill` if given."""
    text = record.text
    if text is None:
        return record.offset, record.size, record.num_text_bytes or record.size
    if spill is None:
        return record.offset, record.size, len(text) if text.isascii() else len(text.encode())
    encoded = text.encode()
    offset = spill.tell()
    spill.write(encoded)
    return offset, len(encoded), len(encoded)
