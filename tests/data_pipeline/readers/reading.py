"""RecordReader a whole file, or in ranges, the way a caller does."""

from dataclasses import replace
from pathlib import Path

from data_pipeline.readers import (
    Format,
    InputFile,
    Record,
    Reject,
    find_files,
    read_records,
    scan_ranges,
)

Found = list[Record | Reject]


def one_file(path: Path | str, format: Format = "auto") -> InputFile:
    (file,) = find_files([str(path)], format=format, exclude=Path("/nowhere")).files
    return file


def read(file: InputFile, *, text_key: str = "text", unit_bytes: int = 2**30) -> Found:
    """Every record of the file, range by range, with lines counted from its beginning."""
    found: Found = []
    lines = 0
    for start, stop in scan_ranges(file, unit_bytes):
        reading = read_records(file, text_key, start, stop)
        found += [
            replace(record, line=record.line + lines) if record.line else record
            for record in reading
        ]
        lines += reading.lines
    return found


def texts(found: Found) -> list[str | None]:
    assert not [record for record in found if isinstance(record, Reject)]
    return [record.text for record in found if isinstance(record, Record)]


def split_at_reject(found: Found) -> tuple[list[str | None], Reject]:
    """The texts before the only Reject, which is the last."""
    assert isinstance(found[-1], Reject), found[-1]
    return texts(found[:-1]), found[-1]
