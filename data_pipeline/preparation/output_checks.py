"""Check the output directory: it is free, holds this dataset already, or holds something else."""

import json
import re
from pathlib import Path

from data_pipeline.errors import DataError, printable
from data_pipeline.shards.manifest import (
    MANIFEST_NAME,
    REJECTS_NAME,
    TOKENIZER_NAME,
    InputSummary,
    ShardManifest,
    load_manifest,
)
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.system.files import STAGING
from data_pipeline.tokenizers import Tokenizer
from data_pipeline.tokenizers.loading import StoredTokenizer, describe_differences


def find_existing(
    out: Path, settings: PrepareSettings, tokenizer: Tokenizer | None
) -> ShardManifest | None:
    """The manifest of a complete dataset with these settings, or None for a free directory.

    `tokenizer` is None if it is trained. Raises DataError if the directory holds
    anything else. Removes temporary reject lists of killed runs, so the caller must hold the lock
    of `out`.
    """
    paths = sorted(path for path in out.iterdir() if path.name != STAGING)
    if out / MANIFEST_NAME not in paths:
        temporary = [path for path in paths if _is_temporary_reject_list(path)]
        others = [path for path in paths if path not in temporary and not _is_reject_list(path)]
        if others:
            shown = ", ".join(printable(path.name) for path in others[:5])
            more = f" and {len(others) - 5} more" if len(others) > 5 else ""
            raise DataError(
                f"{out} holds files that do not belong to a dataset: {shown}{more}. Nothing was "
                "changed; choose an empty or new directory for --out."
            )
        for path in temporary:
            path.unlink()
        return None
    manifest = load_manifest(out)
    changes = _differences("", manifest.settings.model_dump(), settings.model_dump())
    if tokenizer:
        stored = StoredTokenizer(out / TOKENIZER_NAME, manifest.tokenizer_digest).load()
        if stored and stored.to_json() != tokenizer.to_json():  # also for other names of ids
            changes.append(f"tokenizer: {describe_differences(stored, tokenizer)}")
        elif tokenizer.digest != manifest.tokenizer_digest:
            changes.append(f"tokenizer: {manifest.tokenizer_digest} there, {tokenizer.digest} now")
    if changes:
        raise _other_dataset(out, changes)
    return manifest


def require_same_input(existing: ShardManifest, summary: InputSummary, out: Path) -> None:
    """Raise DataError if `existing` was made from another input, or a file of it is missing.

    Input and settings determine tokenizer and shards, so those are not compared.
    """
    if changes := _differences("input ", existing.input.model_dump(), summary.model_dump()):
        raise _other_dataset(out, changes)
    missing = [name for name in existing.file_names() if not (out / name).is_file()]
    if missing:
        raise DataError(
            f"{out} has the manifest of this dataset but not {', '.join(missing[:5])}. Restore "
            f"them, or remove {out} and run this again. To list all damage: txl data verify {out}"
        )


def _differences(prefix: str, old: dict[str, object], new: dict[str, object]) -> list[str]:
    return [
        f"{prefix}{key}: {old[key]!r} there, {value!r} now"
        for key, value in new.items()
        if old[key] != value
    ]


def _other_dataset(out: Path, changes: list[str]) -> DataError:
    return DataError(
        f"{out} holds another dataset: {'; '.join(changes)}. Nothing was changed; choose another "
        f"--out, or remove {out} and run this again. To see its content: txl data inspect {out}"
    )


def _is_temporary_reject_list(path: Path) -> bool:
    """Whether `write_file` was killed before it renamed this file to the reject list."""
    pattern = rf"\.{re.escape(REJECTS_NAME)}\.[0-9]+\.tmp"
    return re.fullmatch(pattern, path.name) is not None and path.is_file()


def _is_reject_list(path: Path) -> bool:
    """Whether this is the reject list of a failed run, not an unrelated file with its name."""
    if path.name != REJECTS_NAME or not path.is_file():
        return False
    with path.open("rb") as file:
        try:
            return set(json.loads(file.readline())) == {"file", "line", "byte", "reason"}
        except (ValueError, TypeError):
            return False
