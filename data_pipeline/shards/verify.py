"""Verifying: every byte of a dataset against its manifest, every problem listed, none skipped.

What is wrong with one shard is `shard_check.py`'s business, and any number of workers share the
shards. Here is what concerns the directory: names, the tokenizer, whose content is whose.
"""

from dataclasses import dataclass
from pathlib import Path

from data_pipeline.atomic_files import sha256_file
from data_pipeline.errors import DataError
from data_pipeline.progress import Progress
from data_pipeline.readers import printable
from data_pipeline.remote import DatasetPath
from data_pipeline.shards.manifest import (
    INDEX_SUFFIX,
    SHARD_SUFFIX,
    ShardManifest,
    is_dataset_file,
    load_manifest,
    open_tokenizer,
)
from data_pipeline.shards.shard_check import ShardCheck, check_shard, glance
from data_pipeline.tokenizers import Tokenizer
from data_pipeline.workers import InProcess, Workers


@dataclass(frozen=True, slots=True)
class Verified:
    """What `verify_dataset` found. No problems: everything is as it was written."""

    manifest: ShardManifest
    problems: list[str]
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

    Raises DataError only when there is no manifest to verify against.
    """
    manifest = load_manifest(directory)
    problems = _name_problems(directory, manifest)
    try:
        tokenizer = open_tokenizer(directory, manifest)
    except DataError as error:
        problems.append(str(error))
        tokenizer = None
    problems += shard_problems(directory, manifest, tokenizer, workers, progress, fast=fast)
    shards = [shard for entry in manifest.splits.values() for shard in entry.shards]
    return Verified(manifest, problems, sum(entry.bytes + entry.index_bytes for entry in shards))


def shard_problems(
    directory: DatasetPath,
    manifest: ShardManifest,
    tokenizer: Tokenizer | None,
    workers: Workers | None,
    progress: Progress,
    *,
    fast: bool = False,
) -> list[str]:
    """The problems of all shards that `manifest` lists, in its order.

    `tokenizer` None: it cannot be read, so text bytes are not checked.
    """
    checks = _checks(directory, manifest, tokenizer)
    owners = {check.entry.sha256: check.entry.name for check in checks}
    owners |= {check.entry.index_sha256: check.entry.index_name for check in checks}
    total, done = sum(check.num_bytes for check in checks), 0
    found: dict[int, list[str]] = {}
    progress("verifying", done, total)
    for number, outcome in (workers or InProcess()).map(glance if fast else check_shard, checks):
        found[number] = [
            each if isinstance(each, str) else each.explain(owners) for each in outcome
        ]
        done += checks[number].num_bytes
        progress("verifying", done, total)
    return [problem for number in sorted(found) for problem in found[number]]


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
