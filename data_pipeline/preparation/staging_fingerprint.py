"""The fingerprint of a staging directory: decides whether its finished units can be reused.

The fingerprint contains everything that the units depend on: settings, format version, digest of a
given tokenizer file, and path, name, size and version mark (local files: modification time) of
every input file. A run with a different fingerprint discards the staging directory.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_pipeline.preparation.finished_units import (
    FINGERPRINT,
    RECORDS,
    remove_scratch_directories,
)
from data_pipeline.preparation.scan import UNIT_BYTES
from data_pipeline.readers import InputFile
from data_pipeline.shards.manifest import VERSION
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.system.files import StagedDirectory, write_file
from data_pipeline.system.sources import local_path
from data_pipeline.tokenizers import Tokenizer


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

    Calls `note` with the reason if it discards finished units.
    """
    path = staged.path / RECORDS / FINGERPRINT
    if staged.path.exists():
        # It is the first file in staging, so a directory without it has no finished units.
        previous = b""
        with contextlib.suppress(OSError):
            previous = path.read_bytes()
        if previous != fingerprint.encode():
            if previous:
                reason = _describe_changes(previous, fingerprint)
                note(f"{staged.path}: discarding unfinished work: {reason}")
            staged.discard()
    staging = staged.stage(fresh=False)
    (staging / RECORDS).mkdir(exist_ok=True)
    if not path.exists():
        write_file(path, fingerprint.encode())
    remove_scratch_directories(staging)
    return staging


def _describe_changes(previous: bytes, fingerprint: str) -> str:
    new: dict[str, Any] = json.loads(fingerprint)
    try:
        old: Any = json.loads(previous)
    except (ValueError, RecursionError):
        return "its fingerprint is damaged"
    if (
        not isinstance(old, dict)
        or old.keys() != new.keys()
        or not isinstance(old["settings"], dict)
    ):
        return "it is damaged, or from another version of txl"
    changes = [
        f"{key} was {old['settings'].get(key)!r} and is {value!r}"
        for key, value in new["settings"].items()
        if old["settings"].get(key) != value
    ]
    if old["tokenizer"] != new["tokenizer"]:
        changes.append("the tokenizer file changed")
    if (old["files"], old["input"]) != (new["files"], new["input"]):
        changes.append("input files changed")
    return "; ".join(changes) or "it is from another version of txl"
