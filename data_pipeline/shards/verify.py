"""Verifying: every byte of a dataset against its manifest, every problem listed, none skipped.

What is damaged or missing is one verdict, what could not be read now another: a network that fails
says nothing of the data behind it.

What is wrong with one shard is `shard_check.py`'s business, and any number of workers share the
shards. Here is what concerns the directory: names, the tokenizer, whose content is whose.
"""

from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import DataError, UnreadError, printable
from data_pipeline.processes.progress import Progress
from data_pipeline.processes.workers import InProcess, Workers
from data_pipeline.shards.manifest import (
    INDEX_SUFFIX,
    SHARD_SUFFIX,
    ShardManifest,
    is_dataset_file,
    load_manifest,
    open_tokenizer,
)
from data_pipeline.shards.shard_check import (
    Finding,
    OtherContent,
    ShardCheck,
    Unread,
    check_shard,
    glance,
)
from data_pipeline.shards.shard_index import what_to_check
from data_pipeline.storage.atomic_files import sha256_file
from data_pipeline.storage.remote_path import DatasetPath
from data_pipeline.storage.source_errors import is_unread
from data_pipeline.tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Verified:
    """What `verify_dataset` found. Nothing listed: everything is as it was written."""

    manifest: ShardManifest
    problems: list[str]
    """What is damaged, missing or extra."""
    unread: list[str]
    """What could not be read now."""
    num_bytes: int
    """Compressed bytes of all shards and indexes that the manifest lists."""


def verify_dataset(
    directory: DatasetPath,
    *,
    fast: bool = False,
    workers: Workers | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Verified:
    """Read everything again, or with `fast` only names, sizes and indexes.

    Raises DataError when there is no manifest to verify against, UnreadError when that, or the
    list of files, could not be read now.
    """
    try:
        manifest = load_manifest(directory)
        problems = _name_problems(directory, manifest)
    except (DataError, OSError) as error:
        if not is_unread(error):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise UnreadError(
            f"{directory} could not be read now: {reason.removesuffix('.')}. Check "
            f"{what_to_check(directory)}, then run this again: it may well be sound."
        ) from error
    unread: list[str] = []
    try:
        tokenizer = open_tokenizer(directory, manifest)
    except DataError as error:
        (unread if is_unread(error) else problems).append(str(error))
        tokenizer = None
    of_shards = shard_problems(directory, manifest, tokenizer, workers, progress, fast=fast)
    problems += of_shards.problems
    unread += of_shards.unread
    shards = [shard for entry in manifest.splits.values() for shard in entry.shards]
    num_bytes = sum(entry.bytes + entry.index_bytes for entry in shards)
    return Verified(manifest, problems, unread, num_bytes)


@dataclass(frozen=True, slots=True)
class ShardProblems:
    """Of all shards, in the manifest's order; as in `Verified`."""

    problems: list[str]
    unread: list[str]


def shard_problems(
    directory: DatasetPath,
    manifest: ShardManifest,
    tokenizer: Tokenizer | None,
    workers: Workers | None,
    progress: Progress,
    *,
    fast: bool = False,
) -> ShardProblems:
    """The problems of all shards that `manifest` lists.

    `tokenizer` None: it cannot be read, so text bytes are not checked.
    """
    checks = _checks(directory, manifest, tokenizer)
    owners = {check.entry.sha256: check.entry.name for check in checks}
    owners |= {check.entry.index_sha256: check.entry.index_name for check in checks}
    total, done = sum(check.num_bytes for check in checks), 0
    found: dict[int, list[Finding]] = {}
    progress("verifying", done, total)
    for number, outcome in (workers or InProcess()).map(glance if fast else check_shard, checks):
        found[number] = outcome
        done += checks[number].num_bytes
        progress("verifying", done, total)
    in_order = [each for number in sorted(found) for each in found[number]]
    return ShardProblems(
        problems=[
            each.explain(owners) if isinstance(each, OtherContent) else each
            for each in in_order
            if not isinstance(each, Unread)
        ],
        unread=[each.problem for each in in_order if isinstance(each, Unread)],
    )


def _checks(
    directory: DatasetPath, manifest: ShardManifest, tokenizer: Tokenizer | None
) -> list[ShardCheck]:
    bytes_of_id = tokenizer.token_bytes() if tokenizer and tokenizer.lossless else None
    return [
        ShardCheck(
            directory.absolute() if isinstance(directory, Path) else directory,
            shard,
            manifest.dtype,
            manifest.vocab_size,
            manifest.end_of_document,
            bytes_of_id,
            opens_documents=tokenizer is None or tokenizer.opens_documents,
        )
        for entry in manifest.splits.values()
        for shard in entry.shards
    ]


def _name_problems(directory: DatasetPath, manifest: ShardManifest) -> list[str]:
    """Shards and indexes that are there but not listed, and what they hold if one is missing."""
    listed = {*manifest.file_names()}
    missing = {name for name in listed if not (directory / name).is_file()}
    contents = {
        (size, digest): name
        for entry in manifest.splits.values()
        for shard in entry.shards
        for name, size, digest in (
            (shard.name, shard.bytes, shard.sha256),
            (shard.index_name, shard.index_bytes, shard.index_sha256),
        )
        if name in missing
    }
    sizes = {size for size, _ in contents}
    problems = []
    for path in [directory / name for name in sorted(entry.name for entry in directory.iterdir())]:
        if path.name in listed or not path.is_file():
            continue
        size = path.stat().st_size
        owner = contents.get((size, sha256_file(path))) if size in sizes else None
        belongs = path.name.endswith((SHARD_SUFFIX, INDEX_SUFFIX))
        if owner:
            problems.append(f"{printable(path.name)}: is {owner} under another name; move it back")
        elif belongs and is_dataset_file(path.name):
            problems.append(f"{path.name}: extra: not in the manifest; move it elsewhere")
        elif belongs:
            problems.append(f"{printable(path.name)}: extra: no name that txl gives; move it away")
    return problems
