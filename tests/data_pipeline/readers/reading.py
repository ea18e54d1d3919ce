"""Read a file as a whole or in ranges, as `txl prepare` does."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

from data_pipeline.readers import (
    Format,
    IdRules,
    InputFile,
    InputFiles,
    Record,
    Reject,
    Source,
    find_files,
    read_records,
    scan_ranges,
)

Records = list[Record | Reject]


def one_file(path: Path | str, format: Format = "auto", ids: IdRules | None = None) -> InputFile:
    key = "ids" if ids else "text"
    found = find_files(
        [str(path)],
        format=format,
        out=Path("/nowhere"),
        ids=ids,
        text_key=key,
    )
    (file,) = found.files
    return file


def read(file: InputFile, *, text_key: str = "text", unit_bytes: int = 2**30) -> Records:
    """All records of the file, range by range, with lines counted from its beginning."""
    records: Records = []
    lines = 0
    for start, stop in scan_ranges(file, unit_bytes):
        source = Source(file, text_key, start, stop)
        records += [
            replace(record, line=record.line + lines) if record.line else record
            for record in read_records(source)
        ]
        lines += source.lines
    return records


def kinds_of(found: InputFiles) -> dict[str, int]:
    """The number of files of every kind."""
    return dict(Counter(file.kind for file in found.files))


def texts(records: Records) -> list[str | None]:
    assert not [record for record in records if isinstance(record, Reject)]
    return [record.text for record in records if isinstance(record, Record)]


def split_at_reject(records: Records) -> tuple[list[str | None], Reject]:
    """The texts of all records but the last, and the last, which is the only Reject."""
    assert isinstance(records[-1], Reject), records[-1]
    return texts(records[:-1]), records[-1]
