"""`txl data push`: copy a complete dataset to object storage, its manifest last.

A reader of the URL therefore sees either no dataset or a complete one, as in a directory that
`prepare` writes. Every local shard and index is hashed before it is sent, and the size of the
remote copy is compared afterwards.
"""

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
    shard_files, remote_sizes = manifest.shard_files, _remote_sizes(target)
    _require_same_dataset(target, manifest, remote_sizes)
    # Without a manifest, a remote file may be from an interrupted push of other data: send all.
    complete = MANIFEST_NAME in remote_sizes
    names = [name for name in manifest.file_names() if name != MANIFEST_NAME] + [MANIFEST_NAME]
    sizes = {name: _local_size(directory, name) for name in names}
    to_send = [name for name in names if not (complete and remote_sizes.get(name) == sizes[name])]
    done, total = 0, sum(sizes[name] for name in to_send)
    progress("sending", done, total)
    for name in to_send:
        _, sha256 = shard_files.get(name, (None, None))
        _send(directory / name, target / name, sizes[name], sha256)
        done += sizes[name]
        progress("sending", done, total)
    return manifest


def _local_size(directory: Path, name: str) -> int:
    if not (directory / name).is_file():
        raise DataError(f"{directory / name} is missing. List all: txl data verify {directory}")
    return (directory / name).stat().st_size


def _remote_sizes(target: RemotePath) -> dict[str, int]:
    try:
        return target.sizes()
    except FileNotFoundError:  # a folder of an object store exists once it contains a file
        return {}
    except OSError as error:
        raise _store_error(target, error) from error


def _require_same_dataset(
    target: RemotePath, manifest: ShardManifest, remote_sizes: dict[str, int]
) -> None:
    if MANIFEST_NAME in remote_sizes:
        digest = load_manifest(target).digest
        # Overwriting would change the data under runs that read this URL.
        if digest != manifest.digest:
            raise DataError(
                f"{target} holds another dataset (digest {digest}, not {manifest.digest}). "
                "Choose another URL, or remove that dataset with the tools of its store."
            )
    listed = {*manifest.file_names()}
    extra = [name for name in remote_sizes if is_dataset_file(name) and name not in listed]
    if extra:
        raise DataError(
            f"{target} holds {extra[0]}, a file of another dataset. Choose another URL, or "
            "remove it with the tools of its store."
        )


def _send(source: Path, target: RemotePath, size: int, sha256: str | None) -> None:
    # Manifest and tokenizer have no entry in the manifest; both were checked when loaded.
    if sha256 and sha256_file(source) != sha256:
        raise DataError(
            f"{source} does not have the manifest's sha256. List all problems: txl data verify "
            f"{source.parent}"
        )
    try:
        target.write_from(source)
        remote_size = target.stat().st_size
    except OSError as error:
        raise _store_error(target, error) from error
    if remote_size != size:
        raise DataError(f"{target} is {remote_size:,} bytes after sending, expected {size:,}.")


def _store_error(target: RemotePath, error: OSError) -> DataError:
    return DataError(
        f"{target}: object storage refuses or fails ({error.strerror}). Check that the bucket "
        "exists, the credentials and the network, then run it again."
    )
