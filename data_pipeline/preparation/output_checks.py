"""What is in the output directory already: nothing, the dataset asked for, or something else."""

import json
import re
from pathlib import Path

from data_pipeline.errors import DataError, printable
from data_pipeline.preparation.settings import PrepareSettings
from data_pipeline.shards.manifest import (
    MANIFEST_NAME,
    REJECTS_NAME,
    InputSummary,
    ShardManifest,
    load_manifest,
)
from data_pipeline.storage.staged_directory import STAGING


def find_existing(
    out: Path, settings: PrepareSettings, tokenizer_digest: str | None
) -> ShardManifest | None:
    """The manifest of a complete dataset with these settings; None for a free directory.

    `tokenizer_digest` None: the corpus decides it. Raises DataError for what else is there. What a
    killed run left of its reject list is removed, so the caller must hold `out`.
    """
    names = sorted(entry.name for entry in out.iterdir() if entry.name != STAGING)
    if MANIFEST_NAME not in names:
        unfinished = [out / name for name in names if _is_unfinished_list(out / name)]
        ours = {path.name for path in unfinished}
        foreign = [name for name in names if name not in ours and not _is_reject_list(out / name)]
        if foreign:
            shown = ", ".join(printable(name) for name in foreign[:5])
            more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
            raise DataError(
                f"{out} holds files that are not of a dataset: {shown}{more}. Nothing was "
                "touched; choose an empty or new directory for --out."
            )
        for path in unfinished:
            path.unlink()
        return None
    manifest = load_manifest(out)
    before, now = manifest.settings.model_dump(), settings.model_dump()
    changes = [f"{key}: {before[key]!r} there, {now[key]!r} now" for key in now]
    changes = [text for text, key in zip(changes, now, strict=True) if before[key] != now[key]]
    if tokenizer_digest and manifest.tokenizer_digest != tokenizer_digest:
        changes.append(f"tokenizer: {manifest.tokenizer_digest} there, {tokenizer_digest} now")
    if changes:
        raise _other_dataset(out, changes)
    return manifest


def require_same_input(existing: ShardManifest, now: InputSummary, out: Path) -> None:
    """The same input and settings give the same tokenizer and shards: only they are compared."""
    before = existing.input
    if before != now:
        changes = [
            f"input {name}: {getattr(before, name)} there, {getattr(now, name)} now"
            for name in type(now).model_fields
            if getattr(before, name) != getattr(now, name)
        ]
        raise _other_dataset(out, changes)
    missing = [name for name in existing.file_names() if not (out / name).is_file()]
    if missing:
        raise DataError(
            f"{out} has the manifest of this dataset but not {', '.join(missing[:5])}. Restore "
            f"them, or remove {out} and run this again. To list all damage: txl data verify {out}"
        )


def _other_dataset(out: Path, changes: list[str]) -> DataError:
    return DataError(
        f"{out} holds another dataset: {'; '.join(changes)}. Nothing was touched; choose another "
        f"--out, or remove {out} and run this again. To look inside: txl data inspect {out}"
    )


def _is_unfinished_list(path: Path) -> bool:
    """Whether `write_file` was killed while it wrote the reject list here aside."""
    aside = rf"\.{re.escape(REJECTS_NAME)}\.[0-9]+\.tmp"
    return re.fullmatch(aside, path.name) is not None and path.is_file()


def _is_reject_list(path: Path) -> bool:
    """Whether this is the list a failed run left; someone else's file of that name is not."""
    if path.name != REJECTS_NAME or not path.is_file():
        return False
    with path.open("rb") as file:
        try:
            return set(json.loads(file.readline())) == {"file", "line", "byte", "reason"}
        except (ValueError, TypeError):
            return False
