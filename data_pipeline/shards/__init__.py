"""Prepared datasets on disk.

    shard_writer.py   documents -> blocks -> a tar (frames.py: zstd frames), and its index
    shard_index.py    where frames, blocks and documents of a shard are
    manifest.py       manifest.json: settings of `txl prepare`, sizes and hashes of all files
    shard_reader.py   tokens of any range, checked (shard_files.py: files, URLs, frame cache)
    data_commands.py  `txl data verify`, `inspect` and `push`

This module refuses a directory that is not a dataset without importing numpy.
"""

from data_pipeline.errors import DataError
from data_pipeline.system.remote_path import DatasetPath, RemotePath, dataset_path

MANIFEST_NAME = "manifest.json"


def require_manifest(directory: str | DatasetPath) -> None:
    """Raise DataError if a local directory has no manifest. URLs are not asked."""
    path = dataset_path(directory) / MANIFEST_NAME
    if not isinstance(path, RemotePath) and not path.is_file():
        raise missing_manifest_error(directory)


def missing_manifest_error(directory: str | DatasetPath) -> DataError:
    """The error for a directory or URL without a manifest."""
    path = dataset_path(directory) / MANIFEST_NAME
    cause = "there is no such directory" if not path.parent.is_dir() else "it has no manifest"
    out = (
        f"DIR, then txl data push DIR {path.parent}"
        if isinstance(path, RemotePath)
        else path.parent
    )
    return DataError(
        f"{path}: {cause}, so this is not a complete dataset (an interrupted prepare writes no "
        f"manifest). Create it: txl prepare INPUT --out {out}"
    )
