"""Finished work units: what was done stays done, also when the program is killed.

A unit writes its files in a folder of its own, moves them to their names and then writes a record:
its key, its result and the size and sha256 of every file. Only what has a record counts, and only
if key and bytes are still the record's. Files of a killed unit have none and are overwritten.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.storage.atomic_files import sha256_file, write_file

RECORDS = "units"
"""The folder in staging for records and for what is not part of the dataset."""
FINGERPRINT = "fingerprint.json"


@dataclass(frozen=True, slots=True)
class FileSum:
    """What a finished file must be. `place` is relative to the staging folder."""

    place: str
    size: int
    sha256: str


def finished(staging: Path, name: str, key: str) -> dict[str, Any] | None:
    """The result of a unit that was finished before; None if it must be done (again)."""
    try:
        record = json.loads((staging / RECORDS / f"{name}.json").read_bytes())
        sums = [FileSum(**fields) for fields in record["files"]]
        if record["key"] != key or not all(_is_whole(staging, file) for file in sums):
            return None
        result: dict[str, Any] = record["result"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result


def finish(
    staging: Path, name: str, key: str, *, result: Mapping[str, Any], files: list[FileSum]
) -> None:
    """Record a unit whose synced files have their names."""
    fields = [{"place": f.place, "size": f.size, "sha256": f.sha256} for f in files]
    record = {"key": key, "result": dict(result), "files": fields}
    write_file(staging / RECORDS / f"{name}.json", json.dumps(record).encode())


@contextlib.contextmanager
def attempt(staging: Path, name: str) -> Iterator[Path]:
    """A folder for one attempt at a unit, removed at the end: two at once never mix their files."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=staging / RECORDS))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def discard_attempts(staging: Path) -> None:
    """Remove what killed attempts left."""
    for entry in (staging / RECORDS).iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)


def _is_whole(staging: Path, file: FileSum) -> bool:
    path = staging / file.place
    return path.stat().st_size == file.size and sha256_file(path) == file.sha256
