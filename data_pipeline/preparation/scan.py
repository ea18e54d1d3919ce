"""Scan units read the input once to locate and hash every document. `index.py` joins the results.

A scan holds no text: location, size and sha256 of every document, about 70 bytes per document on
disk. Its lines count from the start of a range. Texts that cannot be read again from their file
(compressed files, Parquet, URLs, arrays of ids) are copied to the spill file of the unit.
"""

import hashlib
import json
import struct
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save

from data_pipeline.errors import DataError, printable
from data_pipeline.readers import (
    InputFile,
    Record,
    Reject,
    Source,
    read_records,
    scan_ranges,
)

RECORDS = "units"
"""Directory in staging for files that are not part of the dataset."""
UNIT_BYTES = 64 * 2**20
MAX_RANGES_PER_UNIT = 4096
"""Maximum number of file ranges per unit. Limits the size of a unit of many small files."""
MAX_REJECTS = 1_000_000
"""Maximum number of rejects per unit. A reject takes up to 1 kB of RAM."""
MAX_SHOWN_REJECTS = 5
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
        ranges = [
            (each.number, each.file.name, each.file.is_spilled, each.start, each.stop)
            for each in self.ranges
        ]
        # The row format is included so that a scan with other fields is not reused.
        content = json.dumps([_ROW.format, self.text_key, ranges])
        return hashlib.sha256(content.encode()).hexdigest()

    def __str__(self) -> str:
        first = self.ranges[0]
        return printable(f"{self.name}, from byte {first.start:,} of {first.file.name} on")


@dataclass(frozen=True, slots=True, eq=False)
class ScanResult:
    """The N records of a unit in input order, R of them rejects. The unit has F file ranges."""

    records: np.ndarray  # RECORD [N]
    range_lines: np.ndarray  # int64 [F]: number of lines in each file range
    rejects: tuple[Reject, ...]  # [R]
    keys: tuple[str, ...] = ()  # [N] `Record.key`, "" for rejects; () if there are none

    def to_bytes(self) -> bytes:
        rejects = [astuple(reject) for reject in self.rejects]
        texts = np.frombuffer(json.dumps([rejects, self.keys]).encode(), dtype=np.uint8)
        records = self.records.view(np.uint8)
        return save({"records": records, "range_lines": self.range_lines, "texts": texts})

    @classmethod
    def load(cls, path: Path) -> "ScanResult":
        """Load a scan. `output.py` has checked its sha256."""
        arrays = load_file(path)
        rejects, keys = json.loads(arrays["texts"].tobytes())
        return cls(
            records=arrays["records"].view(RECORD),
            range_lines=arrays["range_lines"],
            rejects=tuple(Reject(*fields) for fields in rejects),
            keys=tuple(keys),
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


def spill_path(staging: Path, number: int) -> Path:
    """The file with the texts of unit `number` that cannot be read from their input."""
    return staging / RECORDS / f"spill-{number:06d}"


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
