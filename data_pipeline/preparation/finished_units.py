"""Records of finished work units, with which a rerun after a kill reuses their files.

A unit writes its files in a scratch directory, moves them to their final names and then writes a
record: its key, its result, and the size and sha256 of every file. A unit counts as finished only
if its record exists and the key and the files' content match. A killed unit has no record; its next
execution overwrites its files.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_pipeline.system.files import sha256_file, write_file

RECORDS = "units"
"""Directory in staging for the records, and for files that are not part of the dataset."""
FINGERPRINT = "fingerprint.json"


@dataclass(frozen=True, slots=True)
class FinishedFile:
    """Expected content of a file. `path` is relative to the staging directory."""

    path: str
    size: int
    sha256: str


def load_finished(staging: Path, name: str, key: str) -> dict[str, Any] | None:
    """The result of a finished unit, or None if the unit must run (again).

    Reads and hashes all files of the unit.
    """
    try:
        record = json.loads((staging / RECORDS / f"{name}.json").read_bytes())
        files = [FinishedFile(**fields) for fields in record["files"]]
        if record["key"] != key or not all(_is_intact(staging, file) for file in files):
            return None
        result: dict[str, Any] = record["result"]
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: run the unit again
        return None
    return result


def record_finished(
    staging: Path, name: str, key: str, *, result: Mapping[str, Any], files: list[FinishedFile]
) -> None:
    """Record a unit. Its files must be synced and have their final names."""
    record = {"key": key, "result": dict(result), "files": [asdict(file) for file in files]}
    write_file(staging / RECORDS / f"{name}.json", json.dumps(record).encode())


@contextlib.contextmanager
def scratch_directory(staging: Path, name: str) -> Iterator[Path]:
    """A new directory for one execution of a unit, removed at the end.

    Two executions of the same unit at the same time never share files.
    """
    path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=staging / RECORDS))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def remove_scratch_directories(staging: Path) -> None:
    """Remove the scratch directories of killed units."""
    for entry in (staging / RECORDS).iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)


def _is_intact(staging: Path, file: FinishedFile) -> bool:
    path = staging / file.path
    return path.stat().st_size == file.size and sha256_file(path) == file.sha256
