"""Scan units: ranges of input files, each read once to note where every document stands.

A unit depends on the input alone, so whoever reads it, and whenever, finds the same. Its result is
arrays and no text: about 70 bytes a document on disk. Line numbers count from the range's start;
`corpus.py` adds the lines before.
"""

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from safetensors.numpy import load_file, save

from data_pipeline.documents import InputFile, Reject, scan_ranges
from data_pipeline.texts import Scanned, count_lines, scan_range

UNIT_BYTES = 64 * 2**20
MAX_PARTS = 4096
"""Small files of one unit at most."""
DOCUMENT, EMPTY, REJECT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Part:
    """A range of one file. `number` is the file's place in the input."""

    number: int
    file: InputFile
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ScanUnit:
    number: int
    parts: tuple[Part, ...]
    text_key: str

    @property
    def name(self) -> str:
        return f"input-{self.number:06d}.scan"  # no shard can have this name

    @property
    def spill_name(self) -> str:
        return f"spill-{self.number:06d}"

    @property
    def size(self) -> int:
        return sum(part.stop - part.start for part in self.parts)

    @property
    def key(self) -> str:
        """Digest of all that decides the result, but for the files' content."""
        parts = [(part.number, part.file.name, part.start, part.stop) for part in self.parts]
        return hashlib.sha256(json.dumps([self.text_key, parts]).encode()).hexdigest()

    def __str__(self) -> str:
        more = f" and {len(self.parts) - 1} more files" if len(self.parts) > 1 else ""
        part = self.parts[0]
        return f"{self.name}, bytes {part.start:,} to {part.stop:,} of {part.file.name}{more}"


@dataclass(frozen=True, slots=True, eq=False)
class Scan:
    """What one unit found: N records in order, R of them rejects, P parts."""

    part: np.ndarray
    """uint32 [N]: the unit's part each record is in."""
    kind: np.ndarray
    """uint8 [N]: DOCUMENT, EMPTY or REJECT. Of a reject all columns below are 0."""
    place: np.ndarray
    """uint64 [N, 3]: offset, size, line."""
    text_bytes: np.ndarray
    text_sha256: np.ndarray
    """uint8 [N, 32]."""
    part_lines: np.ndarray
    """int64 [P]: lines of every part."""
    rejects: tuple[Reject, ...]

    def to_bytes(self) -> bytes:
        rejects = json.dumps([(r.file, r.line, r.byte, r.reason) for r in self.rejects])
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        return save({**arrays, "rejects": np.frombuffer(rejects.encode(), dtype=np.uint8)})

    @classmethod
    def load(cls, path: Path) -> "Scan":
        """A scan of ours, checked by its digest before (`finished_units.py`)."""
        arrays = load_file(path)
        rejects = json.loads(arrays.pop("rejects").tobytes())
        return cls(**arrays, rejects=tuple(Reject(*fields) for fields in rejects))


_ARRAYS = ("part", "kind", "place", "text_bytes", "text_sha256", "part_lines")


def plan_scan(files: list[InputFile], text_key: str) -> list[ScanUnit]:
    """Cut the input into units of about UNIT_BYTES: ranges of large files, groups of small ones."""
    return [
        ScanUnit(number, parts, text_key) for number, parts in enumerate(_grouped(_parts(files)))
    ]


def _parts(files: list[InputFile]) -> Iterator[Part]:
    for number, file in enumerate(files):
        for start, stop in scan_ranges(file, UNIT_BYTES):
            yield Part(number, file, start, stop)


def _grouped(parts: Iterable[Part]) -> Iterator[tuple[Part, ...]]:
    group: list[Part] = []
    size = 0
    for part in parts:
        part_size = part.stop - part.start
        if group and (size + part_size > UNIT_BYTES or len(group) == MAX_PARTS):
            yield tuple(group)
            group, size = [], 0
        group.append(part)
        size += part_size
    if group:
        yield tuple(group)


def scan(unit: ScanUnit, spill: BinaryIO | None = None) -> Scan:
    """Read a unit. What cannot be used is among its rejects, never an exception."""
    part_of, kind, place, text_bytes = array("I"), array("B"), array("Q"), array("Q")
    sha256 = bytearray()
    rejects: list[Reject] = []
    nothing = Scanned(0, 0, 0, 0, bytes(32))
    lines = []
    for number, part in enumerate(unit.parts):
        last_line = 0
        for found in scan_range(part.file, unit.text_key, part.start, part.stop, spill):
            last_line = found.line
            if isinstance(found, Reject):
                rejects.append(found)
                record, is_ = nothing, REJECT
            else:
                record, is_ = found, DOCUMENT if found.text_bytes else EMPTY
            part_of.append(number)
            kind.append(is_)
            place.extend((record.offset, record.size, record.line))
            text_bytes.append(record.text_bytes)
            sha256 += record.text_sha256
        lines.append(_num_lines(part, last_line))
    return Scan(
        part=np.array(part_of, dtype=np.uint32),
        kind=np.array(kind, dtype=np.uint8),
        place=np.array(place, dtype=np.uint64).reshape(-1, 3),
        text_bytes=np.array(text_bytes, dtype=np.uint64),
        text_sha256=np.frombuffer(sha256, dtype=np.uint8).reshape(-1, 32),
        part_lines=np.array(lines, dtype=np.int64),
        rejects=tuple(rejects),
    )


def _num_lines(part: Part, last_line: int) -> int:
    """Lines of a part, needed where the file goes on behind it; blank ones yield no record."""
    if part.stop >= part.file.size or not part.file.rereadable:
        return last_line
    try:
        return count_lines(part.file, part.start, part.stop)
    except OSError:  # it vanished meanwhile, which the second reading reports
        return last_line
