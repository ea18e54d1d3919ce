"""The staging directory: records of finished work units, which a rerun after a kill reuses.

A unit writes its files in a scratch directory, moves them to their final names and then writes a
record: its key, its result, and the size and sha256 of every file. A unit counts as finished only
if its record exists and the key and the files' content match.

The fingerprint of the directory contains everything that the units depend on: settings, format
version, a given tokenizer, and path, name, size and version mark (local files: modification time)
of every input file. A run with a different fingerprint discards the directory.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_pipeline.preparation.scan import UNIT_BYTES
from data_pipeline.readers import InputFile
from data_pipeline.shards.manifest import VERSION
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.system.files import StagedDirectory, sha256_file, write_file
from data_pipeline.system.sources import local_path
from data_pipeline.tokenizers import Tokenizer

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


def _is_intact(staging: Path, file: FinishedFile) -> bool:
    path = staging / file.path
    return path.stat().st_size == file.size and sha256_file(path) == file.sha256


# --- the fingerprint ------------------------------------------------------------------------------


def fingerprint_of(
    files: list[InputFile], settings: PrepareSettings, tokenizer: Tokenizer | None
) -> str:
    """The fingerprint as JSON. `tokenizer` is None if it is trained."""
    digest = hashlib.sha256()
    for file in files:
        local = local_path(file.path)
        path = file.path if local is None else os.path.abspath(local)  # noqa: PTH100
        split = [file.split] * bool(file.split)
        digest.update(
            json.dumps([path, file.name, file.kind, file.size, file.mark, *split]).encode()
        )
    content = {
        "version": VERSION,
        "unit_bytes": UNIT_BYTES,
        "settings": settings.model_dump(mode="json"),
        # Of all content: the digest of a vocabulary is independent of the names of ids.
        "tokenizer": tokenizer and hashlib.sha256(tokenizer.to_json().encode()).hexdigest(),
        "files": len(files),
        "input": digest.hexdigest(),
    }
    return json.dumps(content, sort_keys=True)


def claim_staging(staged: StagedDirectory, fingerprint: str, note: Callable[[str], None]) -> Path:
    """The staging directory, empty or with finished units of an earlier run to reuse.

    Calls `note` if it discards finished units.
    """
    path = staged.path / RECORDS / FINGERPRINT
    # It is the first file in staging, so a directory without it has no finished units.
    previous = b""
    with contextlib.suppress(OSError):
        previous = path.read_bytes()
    if previous != fingerprint.encode():
        if previous:
            note(
                f"{staged.path}: discarding the unfinished work of an earlier run: the settings, "
                "the input, the tokenizer or the version of txl changed"
            )
        staged.discard()
    staging = staged.stage(fresh=False)
    (staging / RECORDS).mkdir(exist_ok=True)
    if not path.exists():
        write_file(path, fingerprint.encode())
    for entry in (staging / RECORDS).iterdir():  # the scratch directories of killed units
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
    return staging
