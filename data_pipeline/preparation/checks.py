"""Refuse an input that cannot be used, and an output directory that holds something else."""

import json
import re
from pathlib import Path

from data_pipeline.errors import DataError, printable
from data_pipeline.preparation.scan import InputIndex
from data_pipeline.readers import InputFile, Reject
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


def require_text_files(files: list[InputFile], max_reject_rate: float) -> None:
    """Raise DataError for more binary files than may be rejected, before anything is read.

    Only if every file is one record: the scan finds how many records other files have.
    """
    binary = [file.name for file in files if file.kind == "binary"]
    is_countable = all(file.kind in ("text", "binary") for file in files)
    if is_countable and len(binary) > max_reject_rate * len(files):
        raise DataError(
            f"{len(binary):,} of {len(files):,} files are binary, not text: {_listed(binary)}. "
            "Give a pattern that leaves them out, such as 'in/**/*.txt'. For arrays of token ids: "
            "--format ids. Convert UTF-16 with iconv -f UTF-16 -t UTF-8. For texts with NUL or "
            "control characters: --format text"
        )


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
    _require_complete_files(index, staging, out, max_reject_rate)
    rejected = index.rejected
    records = len(index) + index.empty + rejected
    if rejected and (rejected > max_reject_rate * records or not len(index)):
        _publish_reject_list(staging, out)
        advice = (
            ", or skip them with a higher --max-reject-rate"
            if len(index)
            else "; the input has no other document with text"
        )
        raise DataError(
            f"{rejected:,} of {records:,} records cannot be used, the limit is "
            f"{max_reject_rate:.4%}; no dataset was written."
            f"{_list_rejects(index.first_rejects, rejected)}\nAll are listed in "
            f"{out / REJECTS_NAME}. Repair them and run this again{advice}."
        )
    if not len(index):
        raise DataError(
            f"the input holds no text: {len(index.files)} files, {index.empty} empty documents "
            f"and no other. Give files with text in them: txl prepare INPUT --out {out}"
        )


def _require_complete_files(
    index: InputIndex, staging: Path, out: Path, max_reject_rate: float
) -> None:
    # A file that ends early counts as one reject but loses an unknown number of records, so a
    # reject rate below 1 cannot accept it.
    if index.broken_files and max_reject_rate < 1:
        _publish_reject_list(staging, out)
        advice = ", or accept the loss with --max-reject-rate 1" if len(index) else ""
        raise DataError(
            f"{index.broken_files:,} of {len(index.files):,} files cannot be read to their end, "
            "which loses the rest of each; no dataset was written."
            f"{_list_rejects(index.first_broken, index.broken_files)}\nAll are listed in "
            f"{out / REJECTS_NAME}. Repair these files or remove them from the input{advice}."
        )


def _publish_reject_list(staging: Path, out: Path) -> None:
    with explain_disk_errors("writing the list of rejects", out):
        (staging / REJECTS_NAME).replace(out / REJECTS_NAME)
        fsync_directory(out)


def _list_rejects(first: list[Reject], count: int) -> str:
    more = f"\n  and {count - len(first):,} more" if count > len(first) else ""
    return "".join(f"\n  {reject}" for reject in first) + more


# --- the output directory -------------------------------------------------------------------------


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
