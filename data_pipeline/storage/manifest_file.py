"""Manifest files: JSON that names its format and version and carries a digest of its content.

Used for datasets (`shards/manifest.py`) and for checkpoints (`txl_dist/checkpoint/manifest.py`).
Everything else in a dataset or checkpoint is trusted because its hash is in the manifest, so the
manifest itself is checked completely before any of it is used.
"""

import json
from typing import Any, TypeVar

from pydantic import ValidationError

from data_pipeline.storage import strict_json
from data_pipeline.storage.remote_path import DatasetPath
from data_pipeline.storage.strict_model import StrictModel, first_problem

MAX_BYTES = 256 * 2**20
"""A larger file is no manifest: about a million shards need less."""
M = TypeVar("M", bound=StrictModel)


class WrongFormatError(ValueError):
    """JSON of another program, or of another version of this one."""


def manifest_bytes(content: dict[str, Any]) -> bytes:
    """The file for `content`: its digest first, then the keys in sorted order."""
    digest = strict_json.sha256_of(content)
    return (json.dumps({"digest": digest, **content}, sort_keys=True, indent=1) + "\n").encode()


def load_manifest_file(path: DatasetPath, model: type[M]) -> M:
    """The checked content of a manifest file.

    Raises OSError if it cannot be read, WrongFormatError for another format or version, and
    ValueError for content that is damaged or edited. The messages continue the path's name:
    `"{path} {error}"`.
    """
    if path.stat().st_size > MAX_BYTES:
        raise WrongFormatError(f"is larger than {MAX_BYTES:,} bytes: no manifest")
    try:
        content = strict_json.parse(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON ({error})") from error
    expected = {name: model.model_fields[name].default for name in ("format", "version")}
    if not isinstance(content, dict) or content.get("format") != expected["format"]:
        raise WrongFormatError(f'has no "format": "{expected["format"]}"')
    if content.get("version") != expected["version"]:
        raise WrongFormatError(
            f"has format version {content.get('version')!r}, this txl reads {expected['version']}"
        )
    recorded = content.pop("digest", None)
    try:
        manifest = model.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise ValueError(f"has a wrong entry: {first_problem(error)}") from error
    # Of what was written: a later version may have added keys with defaults.
    digest = strict_json.sha256_of(content)
    if digest != recorded:
        raise ValueError(f"says its digest is {recorded!r}, its content gives {digest!r}")
    return manifest
