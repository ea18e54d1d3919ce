"""`txl data verify`, `inspect` and `push`: what is done with a complete dataset.

`verify` compares every file with the manifest. A file whose sha256 matches the manifest has the
bytes that `txl prepare` wrote, so nothing inside it is checked again. Damaged, missing and extra
files are problems. Files that could not be read at the moment (disk, network, permissions) are
listed separately: they may be intact.

`push` verifies the local dataset, then copies it to object storage with the manifest last, so that
a reader of the URL sees either no dataset or a complete one.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data_pipeline.errors import (
    ConfigError,
    DataError,
    ReadFailureError,
    UnreadableError,
    printable,
)
from data_pipeline.shards.manifest import (
    INDEX_SUFFIX,
    MANIFEST_NAME,
    SHARD_SUFFIX,
    ShardEntry,
    ShardManifest,
    load_manifest,
    open_tokenizer,
)
from data_pipeline.shards.shard_files import what_to_check
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.system.files import sha256_file
from data_pipeline.system.remote_path import DatasetPath, RemotePath, dataset_path
from data_pipeline.system.sources import is_read_failure, scheme_of
from data_pipeline.system.workers import InProcess, Progress, Workers

EXCERPT_TOKENS = 240
WRITABLE = ("s3", "gs")


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
    workers: Workers | None = None,
    progress: Progress = lambda *_: None,
) -> Verified:
    """Hash every file again. Raises DataError without a usable manifest, ReadFailureError if it or
    the list of files could not be read at the moment."""
    try:
        manifest = load_manifest(directory)
        extra = _extra_files(manifest, (path.name for path in directory.iterdir()))
    except (UnreadableError, OSError) as error:
        raise ReadFailureError(
            f"{directory} could not be read now ({error}). Check {what_to_check(directory)}, then "
            "run this again: the data may be intact."
        ) from error
    problems = [
        f"{printable(name)}: extra: not in the manifest; move it elsewhere" for name in extra
    ]
    unread: list[str] = []
    try:
        open_tokenizer(directory, manifest)
    except DataError as error:
        (unread if is_read_failure(error) else problems).append(str(error))
    # Absolute: Ray workers may have another working directory.
    local = directory.absolute() if isinstance(directory, Path) else directory
    sizes = [shard.bytes + shard.index_bytes for shard in manifest.shards]
    done, total = 0, sum(sizes)
    progress("verifying", done, total)
    found = []
    results = (workers or InProcess()).map(partial(_check_shard, local), manifest.shards)
    for number, result in results:
        found.append((number, *result))
        done += sizes[number]
        progress("verifying", done, total)
    for _, of_shard, not_read in sorted(found):  # workers finish in any order
        problems += of_shard
        unread += not_read
    return Verified(manifest, problems, unread, total)


def _extra_files(manifest: ShardManifest, names: Iterable[str]) -> list[str]:
    """Names of shards and indexes that are not in the manifest, sorted."""
    extra = {*names}.difference(manifest.file_names())
    return sorted(name for name in extra if name.endswith((SHARD_SUFFIX, INDEX_SUFFIX)))


def _check_shard(directory: DatasetPath, shard: ShardEntry) -> tuple[list[str], list[str]]:
    """Problems of a shard and its index, and files that could not be read at the moment."""
    problems: list[str] = []
    unread: list[str] = []
    for name, (size, sha256) in shard.files.items():
        try:
            if problem := _file_problem(directory / name, size, sha256):
                problems.append(f"{name}: {problem}")
        except OSError as error:
            (unread if is_read_failure(error) else problems).append(
                f"{name}: cannot be read: {error.strerror}"
            )
    return problems, unread


def _file_problem(path: DatasetPath, size: int, sha256: str) -> str:
    """What differs from the manifest, or ""."""
    if not path.is_file():
        return "missing, or not a regular file"
    found_size = path.stat().st_size
    if found_size != size:
        return f"is {found_size:,} bytes, expected {size:,}: cut short, overwritten or swapped"
    found_sha256 = sha256_file(path)
    if found_sha256 != sha256:
        return f"has sha256 {found_sha256}, expected {sha256}: damaged, overwritten or swapped"
    return ""


# --- inspect --------------------------------------------------------------------------------------


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
        for document in itertools.islice(source.documents(), documents):
            stop = min(document.stop, document.start + 1 + EXCERPT_TOKENS)
            ids = source.read(document.block, document.start, stop)
            # errors="ignore": the excerpt may end inside a character.
            text = tokenizer.decode_bytes(ids).decode("utf-8", errors="ignore")
            result.append(
                Excerpt(split, printable(document.id), document.num_tokens, printable(text))
            )
    return result


# --- push -----------------------------------------------------------------------------------------


def push_dataset(
    directory: Path, url: str, *, progress: Progress = lambda *_: None
) -> ShardManifest:
    """Copy the dataset in `directory` to `url`, except files that are already there and complete.

    Raises DataError for a damaged dataset, another dataset at the URL, or failing object storage;
    ConfigError for a URL that cannot be written; ReadFailureError for a failing local disk.
    """
    target = dataset_path(url)
    if not isinstance(target, RemotePath) or scheme_of(url) not in WRITABLE:
        raise ConfigError(
            f"{target}: give a URL of scheme {' or '.join(WRITABLE)} to push to. To copy a dataset "
            "to a directory or a web server, copy all of its files, manifest.json last."
        )
    verified = verify_dataset(directory, progress=progress)
    if verified.unread:
        raise ReadFailureError(f"{directory}: {verified.unread[0]}. Nothing was sent.")
    if verified.problems:
        raise DataError(
            f"{directory}: {verified.problems[0]}. Nothing was sent. List all problems: "
            f"txl data verify {directory}"
        )
    try:
        _send(directory, target, verified.manifest, progress)
    except OSError as error:
        raise DataError(
            f"{target}: object storage refuses or fails ({error.strerror}). Check that the bucket "
            "exists, the credentials and the network, then run it again."
        ) from error
    return verified.manifest


def _send(directory: Path, target: RemotePath, manifest: ShardManifest, progress: Progress) -> None:
    remote_sizes = target.sizes()
    # Overwriting would change the data under runs that read this URL.
    extra = _extra_files(manifest, remote_sizes)
    if MANIFEST_NAME in remote_sizes and load_manifest(target).digest != manifest.digest:
        extra.insert(0, MANIFEST_NAME)
    if extra:
        raise DataError(
            f"{target} holds another dataset: {extra[0]} is not of this one. Choose another URL, "
            "or remove that dataset with the tools of its store."
        )
    manifest_name, *others = manifest.file_names()
    names = [*others, manifest_name]
    sizes = {name: (directory / name).stat().st_size for name in names}
    # Without a manifest, a remote file may be from an interrupted push of other data.
    if MANIFEST_NAME in remote_sizes:
        names = [name for name in names if remote_sizes.get(name) != sizes[name]]
    done, total = 0, sum(sizes[name] for name in names)
    progress("sending", done, total)
    for name in names:
        (target / name).write_from(directory / name)
        remote_size = (target / name).stat().st_size
        if remote_size != sizes[name]:
            raise DataError(
                f"{target / name} is {remote_size:,} bytes after sending, expected {sizes[name]:,}."
            )
        done += sizes[name]
        progress("sending", done, total)
