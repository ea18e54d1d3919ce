"""Prepared datasets on disk.

    shard_writer.py   documents -> blocks -> a tar (frames.py: zstd frames), and its index
    shard_index.py    where frames, blocks and documents of a shard are
    manifest.py       manifest.json: settings of `txl prepare`, sizes and hashes of all files
    shard_reader.py   tokens of any range, checked (shard_files.py: files, URLs, frame cache)
    data_commands.py  `txl data verify`, `inspect` and `push`

This module refuses a directory that is not a dataset without importing numpy.
"""

from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.system.files import STAGING
from data_pipeline.system.path_kind import PathKind, kind_of
from data_pipeline.system.remote_path import DatasetPath, RemotePath, dataset_path

MANIFEST_NAME = "manifest.json"
REJECTS_NAME = "rejects.jsonl"


def require_manifest(directory: str | DatasetPath) -> None:
    """Raise DataError if a local directory has no manifest. URLs are not asked."""
    path = dataset_path(directory) / MANIFEST_NAME
    if not isinstance(path, RemotePath) and not path.is_file():
        raise no_dataset_error(directory)


def no_dataset_error(directory: str | DatasetPath) -> DataError:
    """The error for a path or URL that has no manifest of a dataset: it says what the path is."""
    path = dataset_path(directory)
    kind = kind_of(path)
    is_local = isinstance(path, Path) and path.is_dir()
    names = {entry.name for entry in path.iterdir()} if is_local else set()
    # What an interrupted prepare leaves is hidden, except rejects and files that are being moved.
    is_free = STAGING in names or {name for name in names if name[0] != "."} <= {REJECTS_NAME}
    is_free |= any(name.endswith((".tar.zst", ".index.safetensors")) for name in names)  # a copy
    if kind not in (PathKind.FOLDER, PathKind.MISSING) or not is_free:
        of_its_text = f"make one of its text: txl prepare {path} --out DIR"
        advice = {
            PathKind.RUN: f"its dataset is data.path in {path / 'config.yaml'}",
            PathKind.FOLDER: of_its_text,
            PathKind.FILE: of_its_text,
        }
        return DataError(
            f"{path} is {kind}, not a dataset; "
            f"{advice.get(kind, 'give the directory of txl prepare')}"
        )
    cause = "it has no manifest" if path.is_dir() else "there is no such directory"
    out = f"DIR, then txl data push DIR {path}" if isinstance(path, RemotePath) else path
    return DataError(
        f"{path / MANIFEST_NAME}: {cause}, so this is not a complete dataset (an interrupted "
        f"prepare writes no manifest). Create it: txl prepare INPUT --out {out}"
    )
