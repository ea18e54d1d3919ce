"""The staging folder of one `txl prepare`: whose work is in it, and whether it can be gone on with.

Its fingerprint holds everything that the work in it depends on: settings, format version, and name,
size and modification time of every input file. With another fingerprint the folder is discarded.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_pipeline.atomic_files import StagedDirectory, write_file
from data_pipeline.documents import InputFile
from data_pipeline.finished_units import FINGERPRINT, RECORDS, discard_attempts
from data_pipeline.manifest import VERSION, PrepareSettings
from data_pipeline.scan import UNIT_BYTES


def fingerprint_of(files: list[InputFile], settings: PrepareSettings) -> str:
    """JSON of what the work depends on."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(json.dumps([file.name, *_state(file)]).encode())
    content = {
        "version": VERSION,
        "unit_bytes": UNIT_BYTES,
        "settings": settings.model_dump(mode="json"),
        "files": len(files),
        "input": digest.hexdigest(),
    }
    return json.dumps(content, sort_keys=True)


def claim_staging(staged: StagedDirectory, fingerprint: str, note: Callable[[str], None]) -> Path:
    """The staging folder, with the finished units of a run that had this fingerprint, or empty.

    `note` is told when work is discarded and why.
    """
    path = staged.path / RECORDS / FINGERPRINT
    if staged.path.exists():
        try:
            before = path.read_text("utf-8")
        except (OSError, ValueError):
            before = ""
        if before != fingerprint:
            if any((staged.path / RECORDS).glob("*.json")):
                changed = _difference(before, fingerprint)
                note(f"{staged.path}: unfinished work is discarded, for {changed}")
            staged.discard()
    staging = staged.stage(fresh=False)
    (staging / RECORDS).mkdir(exist_ok=True)
    if not path.exists():
        write_file(path, fingerprint.encode())
    discard_attempts(staging)
    return staging


def _difference(before: str, now: str) -> str:
    try:
        old, new = json.loads(before), json.loads(now)
        settings: dict[str, Any] = old["settings"]
        changes = [
            f"{key} was {settings.get(key)!r} and is {value!r}"
            for key, value in new["settings"].items()
            if settings.get(key) != value
        ]
        if (old["files"], old["input"]) != (new["files"], new["input"]):
            changes.append("input files changed since")
    except (ValueError, KeyError, TypeError, AttributeError):
        return "it is damaged"
    return "; ".join(changes) or "another version of txl wrote it"


def _state(file: InputFile) -> tuple[int, int]:
    """(size, modification time in ns); what cannot be looked at is said by the scan."""
    try:
        status = os.stat(file.path)  # noqa: PTH116 - a path may be of any kind
    except OSError:
        return file.size, 0
    return status.st_size, status.st_mtime_ns
