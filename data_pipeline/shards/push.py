"""`txl data push`: copy a dataset to object storage, its manifest last.

So a reader of the URL sees either no dataset or a complete one. Every local shard and index is
hashed before it is sent, and the size of the remote copy is compared afterwards.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.shards.manifest import (
    MANIFEST_NAME,
    ShardManifest,
    is_dataset_file,
    load_manifest,
    open_tokenizer,
)
from data_pipeline.system.files import sha256_file
from data_pipeline.system.progress import Progress
from data_pipeline.system.remote_path import RemotePath, dataset_path
from data_pipeline.system.sources import scheme_of

WRITABLE = ("s3", "gs")


def push_dataset(
    directory: Path, url: str, *, progress: Progress = lambda *_: None
) -> ShardManifest:
    """Copy the dataset in `directory` to `url`, except files that are already there and complete.

    Raises DataError for a damaged dataset, another dataset at the URL, or failing object storage;
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
    names = [name for name in manifest.file_names() if name != MANIFEST_NAME] + [MANIFEST_NAME]
    for name in names:
        if not (directory / name).is_file():
            raise DataError(f"{directory / name} is missing. List all: txl data verify {directory}")
    sizes = {name: (directory / name).stat().st_size for name in names}
    shard_files = manifest.shard_files
    with _explain_store_errors(target):
        remote_sizes = target.sizes()
        _require_same_dataset(target, manifest, remote_sizes)
        # Without a manifest, a remote file may be from an interrupted push of other data.
        if MANIFEST_NAME in remote_sizes:
            names = [name for name in names if remote_sizes.get(name) != sizes[name]]
    done, total = 0, sum(sizes[name] for name in names)
    progress("sending", done, total)
    for name in names:
        _, sha256 = shard_files.get(name, (None, None))
        _send(directory / name, target / name, sizes[name], sha256)
        done += sizes[name]
        progress("sending", done, total)
    return manifest


def _require_same_dataset(
    target: RemotePath, manifest: ShardManifest, remote_sizes: dict[str, int]
) -> None:
    # Overwriting would change the data under runs that read this URL.
    listed = {*manifest.file_names()}
    extra = [name for name in remote_sizes if is_dataset_file(name) and name not in listed]
    if MANIFEST_NAME in remote_sizes and load_manifest(target).digest != manifest.digest:
        extra.insert(0, MANIFEST_NAME)
    if extra:
        raise DataError(
            f"{target} holds another dataset: {extra[0]} is not of this one. Choose another URL, "
            "or remove that dataset with the tools of its store."
        )


def _send(source: Path, target: RemotePath, size: int, sha256: str | None) -> None:
    # Manifest and tokenizer have no entry in the manifest; both were checked when loaded.
    if sha256 and sha256_file(source) != sha256:
        raise DataError(
            f"{source} does not have the manifest's sha256. List all problems: txl data verify "
            f"{source.parent}"
        )
    with _explain_store_errors(target):
        target.write_from(source)
        remote_size = target.stat().st_size
    if remote_size != size:
        raise DataError(f"{target} is {remote_size:,} bytes after sending, expected {size:,}.")


@contextlib.contextmanager
def _explain_store_errors(target: RemotePath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{target}: object storage refuses or fails ({error.strerror}). Check that the bucket "
            "exists, the credentials and the network, then run it again."
        ) from error
