"""`txl data verify` and `txl data inspect`: damage of a dataset, and what its documents are.

`verify` compares every file with the manifest. A file whose sha256 matches the manifest has the
bytes that `txl prepare` wrote, so nothing inside it is checked again. Damaged, missing and extra
files are problems. Files that could not be read at the moment (disk, network, permissions) are
listed separately: they may be intact.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import DataError, ReadFailureError, printable
from data_pipeline.shards.manifest import (
    INDEX_SUFFIX,
    SHARD_SUFFIX,
    ShardEntry,
    ShardManifest,
    is_dataset_file,
    load_manifest,
    open_tokenizer,
)
from data_pipeline.shards.shard_files import what_to_check
from data_pipeline.shards.shard_index import read_index
from data_pipeline.shards.shard_reader import SplitReader, open_split
from data_pipeline.system.files import sha256_file
from data_pipeline.system.progress import Progress
from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.system.sources import is_read_failure
from data_pipeline.system.workers import InProcess, Workers


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of `verify_dataset`. The dataset is intact if both lists are empty."""

    manifest: ShardManifest
    problems: list[str]
    """Files that are damaged, missing or extra."""
    unread: list[str]
    """Files that could not be read at the moment."""
    num_bytes: int
    """Compressed bytes of all shards and indexes that the manifest lists."""


def verify_dataset(
    directory: DatasetPath,
    *,
    fast: bool = False,
    workers: Workers | None = None,
    progress: Progress = lambda *_: None,
) -> Verified:
    """Hash every file again; with `fast`, hash the indexes and compare only the shards' sizes.

    Raises DataError without a usable manifest, ReadFailureError if the manifest or the list of
    files could not be read at the moment.
    """
    try:
        manifest = load_manifest(directory)
        problems = _name_problems(directory, manifest)
    except (DataError, OSError) as error:
        if not is_read_failure(error):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise ReadFailureError(
            f"{directory} could not be read now: {reason.removesuffix('.')}. Check "
            f"{what_to_check(directory)}, then run this again: the data may be intact."
        ) from error
    unread: list[str] = []
    try:
        open_tokenizer(directory, manifest)
    except DataError as error:
        (unread if is_read_failure(error) else problems).append(str(error))
    # Absolute: Ray workers may have another working directory.
    local = directory.absolute() if isinstance(directory, Path) else directory
    checks = [_ShardCheck(local, shard, fast) for shard in manifest.shards]
    names = {sha256: name for name, (_, sha256) in manifest.shard_files.items()}
    done, total = 0, sum(check.num_bytes for check in checks)
    progress("verifying", done, total)
    found: dict[int, list[_Problem]] = {}
    for number, shard_problems in (workers or InProcess()).map(_check_shard, checks):
        found[number] = shard_problems
        done += checks[number].num_bytes
        progress("verifying", done, total)
    for number in sorted(found):  # workers finish in any order
        for problem in found[number]:
            message = problem.message
            if problem.sha256 in names:
                other = names[problem.sha256]
                message = f"holds the content of {other}: the two were swapped or renamed"
            (unread if problem.is_unread else problems).append(f"{problem.name}: {message}")
    return Verified(manifest, problems, unread, total)


# --- shards and indexes -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _ShardCheck:
    """One shard and its index: the unit of work."""

    directory: DatasetPath
    entry: ShardEntry
    fast: bool

    def __str__(self) -> str:
        return self.entry.name

    @property
    def num_bytes(self) -> int:
        return self.entry.bytes + self.entry.index_bytes


@dataclass(frozen=True, slots=True)
class _Problem:
    """What is wrong with one file."""

    name: str
    message: str
    is_unread: bool = False
    """The file could not be read at the moment."""
    sha256: str = ""
    """Of a file with another content than the manifest has."""


def _check_shard(check: _ShardCheck) -> list[_Problem]:
    problems = [
        _file_problem(
            check.directory / name, size, sha256, size_only=check.fast and name == check.entry.name
        )
        for name, (size, sha256) in check.entry.files.items()
    ]
    return [problem for problem in problems if problem]


def _file_problem(path: DatasetPath, size: int, sha256: str, *, size_only: bool) -> _Problem | None:
    try:
        if not path.is_file():
            return _Problem(path.name, "missing, or not a regular file")
        found_size = path.stat().st_size
        if size_only and found_size == size:
            return None
        # Hashed even if the size is wrong: the sha256 identifies a file with a wrong name.
        found_sha256 = sha256_file(path)
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        return _Problem(path.name, message, is_unread=is_read_failure(error))
    if (found_size, found_sha256) == (size, sha256):
        return None
    if found_size != size:
        message = f"is {found_size:,} bytes, expected {size:,}: cut short or overwritten"
    else:
        message = f"has sha256 {found_sha256}, expected {sha256}: damaged or overwritten"
    return _Problem(path.name, message, sha256=found_sha256)


# --- names --------------------------------------------------------------------------------------


def _name_problems(directory: DatasetPath, manifest: ShardManifest) -> list[str]:
    """Files that the manifest does not list, if they are named like shards or are missing ones."""
    listed = {*manifest.file_names()}
    missing = {
        content: name
        for name, content in manifest.shard_files.items()
        if not (directory / name).is_file()
    }
    sizes = {size for size, _ in missing}
    problems = []
    for path in [directory / name for name in sorted(entry.name for entry in directory.iterdir())]:
        if path.name in listed or not path.is_file():
            continue
        size = path.stat().st_size
        # Hashed only if a missing file has this size: other files may be large.
        real_name = missing.get((size, sha256_file(path))) if size in sizes else None
        if real_name:
            problem = f"is {real_name} under another name; move it back"
        elif not path.name.endswith((SHARD_SUFFIX, INDEX_SUFFIX)):
            continue
        elif is_dataset_file(path.name):
            problem = "extra: not in the manifest; move it elsewhere"
        else:
            problem = "extra: not a file name that txl writes; move it elsewhere"
        problems.append(f"{printable(path.name)}: {problem}")
    return problems


# --- the beginnings of documents ------------------------------------------------------------------


EXCERPT_TOKENS = 240


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The beginning of one document."""

    split: str
    document_id: str
    tokens: int
    """Tokens of the whole document, including its first, the end-of-document token."""
    text: str


def excerpts(directory: DatasetPath, *, documents: int) -> list[Excerpt]:
    """The beginnings of the first `documents` documents of every split, safe to print."""
    manifest = load_manifest(directory)
    tokenizer = open_tokenizer(directory, manifest)
    result = []
    for split, _ in manifest.train_first():
        source = open_split(directory, split, manifest=manifest, cache_frames=1)
        for block, start, stop, document_id in itertools.islice(_documents(source), documents):
            ids = source.read(block, start, min(stop, start + 1 + EXCERPT_TOKENS))
            # errors="ignore": the excerpt may end inside a character.
            text = tokenizer.decode_bytes(ids).decode("utf-8", errors="ignore")
            result.append(Excerpt(split, printable(document_id), stop - start, printable(text)))
    return result


def _documents(source: SplitReader) -> Iterator[tuple[int, int, int, str]]:
    """(block, start, stop, id) of every document of a split, read as far as it is iterated."""
    blocks = itertools.count()
    for entry in source.entry.shards:
        index = read_index(source.directory, entry, source.dtype.itemsize)
        ids = map(index.document_id, itertools.count())
        for block in itertools.islice(blocks, entry.blocks):
            starts = source.document_starts(block).tolist()
            stops = [*starts[1:], int(source.block_tokens[block])]
            for start, stop in zip(starts, stops, strict=True):
                yield block, start, stop, next(ids)
