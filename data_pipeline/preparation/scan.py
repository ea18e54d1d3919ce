"""Scan units: ranges of input files, each read once to note where every document stands.

A unit depends on the input alone, so whoever reads it, and whenever, finds the same. Its result is
arrays and no text: about 70 bytes a document on disk. Line numbers count from the range's start;
`input_index.py` adds the lines before.
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

from data_pipeline.errors import DataError, printable
from data_pipeline.readers import InputFile, Record, Reject, read_records, scan_ranges

UNIT_BYTES = 64 * 2**20
MAX_PARTS = 4096
"""Small files of one unit at most."""
MOST_REJECTS = 1_000_000
"""Of one unit; each takes most of a kilobyte of memory."""
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
        fields = [(r.file, r.line, r.byte, r.reason, r.loses_rest) for r in self.rejects]
        rejects = json.dumps(fields)
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


def spill_name(number: int) -> str:
    """The file with the texts of unit `number` that cannot be read again where they are."""
    return f"spill-{number:06d}"


def scan(unit: ScanUnit, spill: BinaryIO | None = None) -> Scan:
    """Read a unit. What cannot be used is among its rejects.

    Raises UnfinishedError for a disk or server that fails and may be well another time, DataError
    for more than MOST_REJECTS, which would fill the memory: such input is of another format.
    Texts of files that are not rereadable go to `spill`, if given, and their places are in it.
    """
    part_of, kind, places, text_sizes = array("I"), array("B"), array("Q"), array("Q")
    sha256 = bytearray()
    rejects: list[Reject] = []
    lines = []
    for number, part in enumerate(unit.parts):
        target = None if part.file.rereadable else spill
        reading = read_records(part.file, unit.text_key, part.start, part.stop)
        last_line = 0
        for found in reading:
            last_line = found.line
            part_of.append(number)
            if isinstance(found, Reject):
                rejects.append(found)
                if len(rejects) > MOST_REJECTS:
                    raise _no_text(part, rejects)
                kind.append(REJECT)
                places.extend((0, 0, 0))
                text_sizes.append(0)
                sha256 += bytes(32)
                continue
            offset, size, text_bytes = _place(found, target)
            kind.append(DOCUMENT if text_bytes else EMPTY)
            places.extend((offset, size, found.line))
            text_sizes.append(text_bytes)
            sha256 += found.sha256
        # Where reading broke off no lines are counted; the next part's must differ all the same.
        lines.append(reading.lines or last_line)
    return Scan(
        part=np.array(part_of, dtype=np.uint32),
        kind=np.array(kind, dtype=np.uint8),
        place=np.array(places, dtype=np.uint64).reshape(-1, 3),
        text_bytes=np.array(text_sizes, dtype=np.uint64),
        text_sha256=np.frombuffer(sha256, dtype=np.uint8).reshape(-1, 32),
        part_lines=np.array(lines, dtype=np.int64),
        rejects=tuple(rejects),
    )


def _no_text(part: Part, rejects: list[Reject]) -> DataError:
    shown = "".join(f"\n  {reject}" for reject in rejects[:5])
    return DataError(
        f"{printable(part.file.name)}: more than {MOST_REJECTS:,} records near byte {part.start:,} "
        f"cannot be used, so it is hardly {part.file.kind}.{shown}\nNo dataset was written. "
        "Give its format with --format, or leave it out."
    )


def _place(record: Record, spill: BinaryIO | None) -> tuple[int, int, int]:
    """(offset, size, UTF-8 bytes of the text), the first two in `spill` if that is given."""
    text = record.text
    if text is None:
        return record.offset, record.size, record.size
    if spill is None:
        return record.offset, record.size, len(text) if text.isascii() else len(text.encode())
    raw = text.encode()
    offset = spill.tell()
    spill.write(raw)
    return offset, len(raw), len(raw)
