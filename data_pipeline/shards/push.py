"""Pushing: a complete dataset copied to object storage, the manifest last.

So a reader of the URL finds either no dataset or all of it, as with a directory that `prepare`
writes. Every local file is hashed before it is sent, and its size asked for once it has arrived.
"""

from pathlib import Path

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.processes.progress import Progress
from data_pipeline.shards.manifest import (
    MANIFEST_NAME,
    ShardManifest,
    is_dataset_file,
    load_manifest,
    open_tokenizer,
)
from data_pipeline.storage.atomic_files import sha256_file
from data_pipeline.storage.remote_path import RemotePath, dataset_path
from data_pipeline.storage.urls import scheme_of

WRITABLE = ("s3", "gs")


def push_dataset(
    directory: Path, url: str, *, progress: Progress = lambda what, done, total: None
) -> ShardManifest:
    """Copy the dataset of `directory` to `url`; files that are there, complete, are left alone.

    Raises DataError for a damaged dataset, another one at the URL, or a store that fails;
    ConfigError for a URL that cannot be written.
    """
    target = dataset_path(url)
    if not isinstance(target, RemotePath) or scheme_of(url) not in WRITABLE:
        raise ConfigError(
            f"{target}: give a URL of scheme {' or '.join(WRITABLE)} to push to. To copy a dataset "
            "to a directory or a web server, copy all of its files, manifest.json last."
        )
    manifest = load_manifest(directory)
    open_tokenizer(directory, manifest)
    there = _sizes(target)
    _refuse_another(target, manifest, there)
    complete = MANIFEST_NAME in there  # else nothing vouches for what an interrupted push left
    hashes = _hashes(manifest)
    names = [name for name in manifest.file_names() if name != MANIFEST_NAME] + [MANIFEST_NAME]
    sizes = {name: (directory / name).stat().st_size for name in names if _is_here(directory, name)}
    missing = [name for name in names if not (complete and there.get(name) == sizes[name])]
    done, total = 0, sum(sizes[name] for name in missing)
    progress("sending", done, total)
    for name in missing:
        _send(directory / name, target / name, sizes[name], hashes.get(name))
        done += sizes[name]
        progress("sending", done, total)
    return manifest


def _hashes(manifest: ShardManifest) -> dict[str, str]:
    """What shards and indexes must hold, by name."""
    shards = [shard for entry in manifest.splits.values() for shard in entry.shards]
    hashes = {shard.name: shard.sha256 for shard in shards}
    return hashes | {shard.index_name: shard.index_sha256 for shard in shards}


def _is_here(directory: Path, name: str) -> bool:
    if (directory / name).is_file():
        return True
    raise DataError(f"{directory / name} is missing. List all: txl data verify {directory}")


def _sizes(target: RemotePath) -> dict[str, int]:
    try:
        return target.sizes()
    except FileNotFoundError:  # a folder of an object store exists once something is in it
        return {}
    except OSError as error:
        raise _failed(target, error) from error


def _refuse_another(target: RemotePath, manifest: ShardManifest, there: dict[str, int]) -> None:
    if MANIFEST_NAME in there:
        found = load_manifest(target)
        if found.digest != manifest.digest:
            raise DataError(
                f"{target} holds another dataset (digest {found.digest}, not {manifest.digest}). "
                "Choose another URL, or remove that one with the tools of its store."
            )
    listed = {*manifest.file_names()}
    foreign = [name for name in there if is_dataset_file(name) and name not in listed]
    if foreign:
        raise DataError(
            f"{target} holds {foreign[0]}, which is of another dataset. Choose another URL, or "
            "remove it with the tools of its store."
        )


def _send(source: Path, target: RemotePath, size: int, sha256: str | None) -> None:
    if sha256 and sha256_file(source) != sha256:
        raise DataError(
            f"{source} is not what the manifest says. List all that is wrong: txl data verify "
            f"{source.parent}"
        )
    try:
        target.write_from(source)
        found = target.stat().st_size
    except OSError as error:
        raise _failed(target, error) from error
    if found != size:
        raise DataError(f"{target} is {found:,} bytes after it was sent, expected {size:,}.")


def _failed(target: RemotePath, error: OSError) -> DataError:
    return DataError(
        f"{target}: the store refuses or fails ({error.strerror}). Check that the bucket is there, "
        "the credentials and the network, then run it again."
    )
