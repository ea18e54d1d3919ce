"""Refuse an input that cannot be used, and an output directory that holds something else."""

import json
from pathlib import Path

from data_pipeline.errors import DataError, printable
from data_pipeline.preparation.scan import MAX_SHOWN_REJECTS, InputIndex
from data_pipeline.readers import InputFile
from data_pipeline.shards.manifest import (
    MANIFEST_NAME,
    REJECTS_NAME,
    TOKENIZER_NAME,
    InputSummary,
    ShardManifest,
    load_manifest,
)
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.system.files import STAGING, explain_disk_errors, fsync_directory
from data_pipeline.tokenizers import Tokenizer
from data_pipeline.tokenizers.loading import StoredTokenizer, describe_differences

_MAX_LISTED = 5


def warn_of_empty_files(files: list[InputFile]) -> str:
    """A line that names files of 0 bytes; "" if there are none.

    Not those of kind text, which are counted as empty documents, such as __init__.py. A URL without
    a version mark may have an unknown size.
    """
    empty = [f.name for f in files if not f.size and f.mark and f.kind != "text"]
    return f"{len(empty):,} of {len(files):,} files have 0 bytes: {_listed(empty)}" if empty else ""


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED:,} more" * (len(names) > _MAX_LISTED)
    return ", ".join(map(printable, names[:_MAX_LISTED])) + more


def require_usable_input(
    index: InputIndex, staging: Path, out: Path, max_reject_rate: float
) -> None:
    """Raise DataError for an input without text, too many rejects, or a file that ends early.

    Before it raises for rejects or broken files, it moves the list of rejects from `staging` to
    `out`.
    """
    rejected, broken = index.rejected, len(index.broken)
    records = len(index) + index.empty + rejected
    # A file that ends early counts as one reject but loses an unknown number of records, so a
    # reject rate below 1 cannot accept it.
    if broken and max_reject_rate < 1:
        problem = (
            f"{broken:,} of {len(index.files):,} files cannot be read to their end, which loses "
            "the rest of each"
        )
        first, count, rate = (
            [*index.broken.values()][:MAX_SHOWN_REJECTS],
            broken,
            "--max-reject-rate 1",
        )
    elif rejected and (rejected > max_reject_rate * records or not len(index)):
        problem = (
            f"{rejected:,} of {records:,} records cannot be used, the limit is "
            f"{max_reject_rate:.4%}"
        )
        first, count, rate = index.first_rejects, rejected, "a higher --max-reject-rate"
    elif not len(index):
        raise DataError(
            f"the input holds no text: {len(index.files)} files, {index.empty} empty documents "
            f"and no other. Give files with text in them: txl prepare INPUT --out {out}"
        )
    else:
        return
    with explain_disk_errors("writing the list of rejects", out):
        (staging / REJECTS_NAME).replace(out / REJECTS_NAME)
        fsync_directory(out)
    shown = "".join(f"\n  {reject}" for reject in first)
    more = f"\n  and {count - len(first):,} more" if count > len(first) else ""
    raise DataError(
        f"{problem}; no dataset was written.{shown}{more}\nAll are listed in "
        f"{out / REJECTS_NAME}. Repair them and run this again, or accept the loss with {rate}."
    )


# --- the output directory -------------------------------------------------------------------------


def find_existing(
    out: Path, settings: PrepareSettings, tokenizer: Tokenizer | None
) -> ShardManifest | None:
    """The manifest of a complete dataset with these settings, or None for a free directory.

    `tokenizer` is None if it is trained. Raises DataError if the directory holds
    anything else, except the list of rejects of a failed run.
    """
    paths = sorted(path for path in out.iterdir() if path.name != STAGING)
    if out / MANIFEST_NAME not in paths:
        others = [path.name for path in paths if not _is_reject_list(path)]
        if others:
            raise DataError(
                f"{out} holds files that do not belong to a dataset: {_listed(others)}. Nothing "
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


def _is_reject_list(path: Path) -> bool:
    """Whether this is the reject list of a failed run, not an unrelated file with its name."""
    if path.name != REJECTS_NAME or not path.is_file():
        return False
    with path.open("rb") as file:
        try:
            return set(json.loads(file.readline())) == {"file", "line", "byte", "reason"}
        except (ValueError, TypeError):
            return False
