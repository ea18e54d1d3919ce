"""What a path is: a dataset, a checkpoint, a run, ...

Only for messages: a command that was given another path than it expects says what it was given.
"""

from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.system.strict_json import parse_json


class PathKind(StrEnum):
    """The values complete a sentence: PATH is ..."""

    DATASET = "a dataset"
    CHECKPOINT = "a checkpoint"
    RUN = "a run directory"
    MODEL = "an exported model"
    CONFIG = "a config file"
    FILE = "a file"
    FOLDER = "a directory"
    MISSING = "missing"


MAX_BYTES = 256 * 2**20
"""A longer file is not read for a message."""
_FORMATS = {
    "txl-shards": PathKind.DATASET,
    "txl-checkpoint": PathKind.CHECKPOINT,
    "txl-model": PathKind.MODEL,
}


def kind_of(path: DatasetPath) -> PathKind:
    """What `path` is, by the names of its files and the format that its manifest or config names.

    Nothing is verified: a damaged dataset is a dataset. Any other URL counts as a directory.
    """
    kind = _kind_in(path / "manifest.json") or _kind_in(path / "config.json")
    if kind or not isinstance(path, Path):
        return kind or PathKind.FOLDER
    has_settings = (path / "config.yaml").is_file() and (path / "logs").is_dir()
    if has_settings or (path / "checkpoints").is_dir():
        return PathKind.RUN
    if path.is_file():
        return PathKind.CONFIG if path.suffix in (".yaml", ".yml") else PathKind.FILE
    return PathKind.FOLDER if path.exists() else PathKind.MISSING


def _kind_in(path: DatasetPath) -> PathKind | None:
    """The kind that a manifest or config names; None if it cannot be read or names no format."""
    with suppress(OSError, ValueError, RecursionError):
        if isinstance(path, Path) and path.stat().st_size > MAX_BYTES:
            return None
        content = parse_json(path.read_bytes())
        if isinstance(content, dict):
            of_transformers = PathKind.MODEL if "model_type" in content else None
            return _FORMATS.get(str(content.get("format")), of_transformers)
    return None
