"""The staging folder of one `txl prepare`: whose work is in it, and whether it can be gone on with.

Its fingerprint holds everything that the work in it depends on: settings, format version, a
tokenizer brought along, and path, name, size and version mark (local: modification time) of every
input file. With another fingerprint the folder is discarded.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_pipeline.preparation.finished_units import FINGERPRINT, RECORDS, discard_attempts
from data_pipeline.preparation.scan import UNIT_BYTES
from data_pipeline.preparation.settings import PrepareSettings
from data_pipeline.readers import InputFile
from data_pipeline.shards.manifest import VERSION
from data_pipeline.storage.atomic_files import write_file
from data_pipeline.storage.staged_directory import StagedDirectory
from data_pipeline.storage.urls import local_path


def fingerprint_of(
    files: list[InputFile], settings: PrepareSettings, tokenizer_digest: str | None
) -> str:
    """JSON of what the work depends on. `tokenizer_digest` None: it is still to be trained."""
    digest = hashlib.sha256()
    for file in files:
        local = local_path(file.path)
        path = file.path if local is None else os.path.abspath(local)  # noqa: PTH100
        digest.update(json.dumps([path, file.name, file.kind, file.size, file.mark]).encode())
    content = {
        "version": VERSION,
        "unit_bytes": UNIT_BYTES,
        "settings": settings.model_dump(mode="json"),
        "tokenizer": tokenizer_digest,
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
        if old["tokenizer"] != new["tokenizer"]:
            changes.append("the tokenizer given is another one")
        if (old["files"], old["input"]) != (new["files"], new["input"]):
            changes.append("input files changed since")
    except (ValueError, KeyError, TypeError, AttributeError):
        return "it is damaged"
    return "; ".join(changes) or "another version of txl wrote it"
