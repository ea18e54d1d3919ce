"""Manifest files: JSON with a format name, a version and a digest of the content.

Used for datasets (`shards/manifest.py`) and checkpoints (`txl_dist/checkpoint/manifest.py`). All
other files of a dataset or checkpoint are verified against hashes in the manifest, so the manifest
itself is checked completely before any entry is used.
"""

import json
from typing import Any, TypeVar

from pydantic import ValidationError

from data_pipeline.storage import strict_json
from data_pipeline.storage.remote_path import DatasetPath
from data_pipeline.storage.strict_model import StrictModel, first_problem

MAX_BYTES = 256 * 2**20
"""A larger file is refused unread. About a million shards need less."""
M = TypeVar("M", bound=StrictModel)


class WrongFormatError(ValueError):
    """JSON of a different program or format version."""


def manifest_bytes(content: dict[str, Any], *, tools: dict[str, str] | None = None) -> bytes:
    """The bytes of a manifest file: `content` and its digest, with sorted keys.

    `tools` says which programs wrote the files. It is information for people: not part of the
    content or of its digest.
    """
    added: dict[str, Any] = {"digest": strict_json.sha256_of(content)}
    if tools:
        added["tools"] = tools
    return (json.dumps({**added, **content}, sort_keys=True, indent=1) + "\n").encode()


def load_manifest_file(path: DatasetPath, model: type[M]) -> M:
    """The verified content of a manifest file.

    Raises OSError if it cannot be read, WrongFormatError for a different format or version, and
    ValueError for damaged or edited content. A caller prints `f"{path} {error}"`.
    """
    if path.stat().st_size > MAX_BYTES:
        raise WrongFormatError(f"is larger than {MAX_BYTES:,} bytes, so it is not a manifest")
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
    content.pop("tools", None)
    try:
        manifest = model.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise ValueError(f"has a wrong entry: {first_problem(error)}") from error
    # Computed from the file's keys, not from the model: a later version may add keys with defaults,
    # which the writer of this file did not know.
    digest = strict_json.sha256_of(content)
    if digest != recorded:
        raise ValueError(f"records the digest {recorded!r}, but its content has {digest!r}")
    return manifest
