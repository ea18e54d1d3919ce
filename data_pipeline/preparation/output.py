"""The output directory of `txl prepare`: what it may hold, and the work that a rerun reuses.

It is refused if it holds something else than this dataset or an interrupted run. An input with too
many rejects leaves its list of rejects there.

Its staging directory has records of finished work units. A unit writes its files in a scratch
directory, moves them to their final names and then writes a record: its key, its result, and the
size and sha256 of every file. A unit counts as finished only if its record exists and the key and
the files' content match. The fingerprint of the staging directory contains everything that the
units depend on: settings, format version, a given tokenizer, and path, name, size and version mark
(local files: modification time) of every input file. A run with a different fingerprint discards
the staging directory.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError, counted
from data_pipeline.preparation.documents import RECORDS
from data_pipeline.preparation.scan import MAX_SHOWN_REJECTS, UNIT_BYTES, InputIndex
from data_pipeline.readers import InputFile
from data_pipeline.readers.split_names import list_names
from data_pipeline.readers.unpack import UNPACKED
from data_pipeline.shards import REJECTS_NAME
from data_pipeline.shards.manifest import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    VERSION,
    InputSummary,
    PrepareSettings,
    ShardManifest,
    load_manifest,
)
from data_pipeline.system.files import (
    STAGING,
    StagedDirectory,
    explain_disk_errors,
    fsync_directory,
    sha256_file,
    write_file,
)
from data_pipeline.system.sources import local_path
from data_pipeline.tokenizers import Tokenizer
from data_pipeline.tokenizers.loading import StoredTokenizer, describe_differences


def find_existing(
    out: Path,
    settings: PrepareSettings,
    tokenizer: Tokenizer | None,
    summarize_input: Callable[[], InputSummary],
) -> ShardManifest | None:
    """The manifest of the complete dataset of this input, or None for a free directory.

    `tokenizer` is None if it is trained: input and settings determine it, and the shards. Raises
    DataError if the directory holds anything else, except the list of rejects of a failed run, or
    if a file is missing. `summarize_input` reads all of it, and is called if all else is the same.
    """
    paths = sorted(path for path in out.iterdir() if path.name not in (STAGING, UNPACKED))
    if out / MANIFEST_NAME not in paths:
        others = [path.name for path in paths if not _is_reject_list(path)]
        if others:
            raise DataError(
                f"{out} holds files that do not belong to a dataset: {list_names(others)}. Nothing "
                "was changed; choose an empty or new directory for --out."
            )
        return None
    manifest = load_manifest(out)
    changes = _differences("", manifest.settings.model_dump(), settings.model_dump())
    if tokenizer:
        stored = StoredTokenizer(out / TOKENIZER_NAME, manifest.tokenizer_digest).load()
        if stored and stored.to_json() != tokenizer.to_json():  # also for other names of ids
            changes.append(f"tokenizer: {describe_differences(stored, tokenizer)}")
        elif tokenizer.digest != manifest.tokenizer_digest:
            changes.append(f"tokenizer: {manifest.tokenizer_digest} there, {tokenizer.digest} now")
    if not changes:
        old, new = manifest.input.model_dump(), summarize_input().model_dump()
        changes = _differences("input ", old, new)
    if changes:
        raise DataError(
            f"{out} holds another dataset: {'; '.join(changes)}. Nothing was changed; choose "
            f"another --out, or remove {out} and run this again. To see its content: txl data "
            f"inspect {out}"
        )
    missing = [name for name in manifest.file_names() if not (out / name).is_file()]
    if missing:
        raise DataError(
            f"{out} has the manifest of this dataset but not {', '.join(missing[:5])}. Restore "
            f"them, or remove {out} and run this again. To list all damage: txl data verify {out}"
        )
    return manifest


def _differences(prefix: str, old: dict[str, object], new: dict[str, object]) -> list[str]:
    return [
        f"{prefix}{key}: {old[key]!r} there, {value!r} now"
        for key, value in new.items()
        if old[key] != value
    ]


def _is_reject_list(path: Path) -> bool:
    """Whether this is the reject list of a failed run, not another file with its name."""
    if path.name != REJECTS_NAME or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(9) == b'{"file": '


def require_usable_input(
    index: InputIndex, staging: Path, out: Path, max_reject_rate: float
) -> None:
    """Raise DataError for an input without text, too many rejects, or a file that ends early.

    Before it raises for rejects or broken files, it moves the list of rejects from `staging` to
    `out`.
    """
    rejected, num_documents = index.rejected, index.num_documents
    records = num_documents + index.empty + rejected
    if index.broken and max_reject_rate < 1:
        # A file that ends early counts as one reject but loses an unknown number of records, so a
        # reject rate below 1 cannot accept it.
        first, count, rate = [*index.broken.values()], len(index.broken), "--max-reject-rate 1"
        problem = (
            f"{count:,} of {len(index.files):,} files cannot be read to their end, which loses "
            "the rest of each"
        )
    elif rejected and (rejected > max_reject_rate * records or not num_documents):
        first, count, rate = index.first_rejects, rejected, "a higher --max-reject-rate"
        limit = f"the limit is {max_reject_rate:.4%}" if num_documents else "and none is left"
        problem = f"{rejected:,} of {records:,} records cannot be used, {limit}"
    elif not num_documents:
        raise DataError(
            f"the input holds no text: {counted(len(index.files), 'file')}, "
            f"{counted(index.empty, 'empty document')} and no other. Give files with text in them: "
            f"txl prepare INPUT --out {out}"
        )
    else:
        return
    with explain_disk_errors("writing the list of rejects", out):
        (staging / REJECTS_NAME).replace(out / REJECTS_NAME)
        fsync_directory(out)
    shown = "".join(f"\n  {reject}" for reject in first[:MAX_SHOWN_REJECTS])
    if count > MAX_SHOWN_REJECTS:
        shown += f"\n  and {count - MAX_SHOWN_REJECTS:,} more"
    accept = f", or accept the loss with {rate}" if num_documents else ""
    raise DataError(
        f"{problem}; no dataset was written.{shown}\nAll are listed in {out / REJECTS_NAME}. "
        f"Repair them and run this again{accept}."
    )


# --- finished work units ----------------------------------------------------------------------


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
        if record["key"] != key:
            return None
        for file in files:
            path = staging / file.path
            if path.stat().st_size != file.size or sha256_file(path) != file.sha256:
                return None
        return dict(record["result"])
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: run the unit again
        return None


def record_finished(
    staging: Path, name: str, key: str, *, result: Mapping[str, Any], files: list[FinishedFile]
) -> None:
    """Record a unit. Its files must be synced and have their final names."""
    record = {"key": key, "result": dict(result), "files": [asdict(file) for file in files]}
    write_file(staging / RECORDS / f"{name}.json", json.dumps(record).encode())


# --- the fingerprint ------------------------------------------------------------------------------


def fingerprint_of(
    files: list[InputFile], settings: PrepareSettings, tokenizer: Tokenizer | None
) -> str:
    """The fingerprint as JSON. `tokenizer` is None if it is trained."""
    digest = hashlib.sha256()
    for file in files:
        address = file.archive or file.path
        local = local_path(address)
        path = address if local is None else os.path.abspath(local)  # noqa: PTH100
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
    previous = path.read_bytes() if path.is_file() else b""
    if previous != fingerprint.encode():
        if previous:
            note(
                f"{staged.path}: discarding the unfinished work of an earlier run: the settings, "
                "the input, the tokenizer or the version of txl changed"
            )
        staged.discard()
    staging = staged.stage(fresh=False)
    (staging / RECORDS).mkdir(exist_ok=True)
    write_file(path, fingerprint.encode())
    for entry in (staging / RECORDS).iterdir():  # the scratch directories of killed units
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
    return staging
