"""Strict models, and manifest files with a digest.

A manifest file has a format name, a version and a digest of its content. All other files of a
dataset (`shards/manifest.py`) or checkpoint (`txl_dist/checkpoint/manifest.py`) are verified
against hashes in the manifest, so the manifest is checked completely before any entry is used.
"""

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.system.strict_json import parse_json, sha256_of

M = TypeVar("M", bound="StrictModel")


class StrictModel(BaseModel):
    """A frozen pydantic model without unknown keys, type coercion, NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def first_problem(error: ValidationError) -> str:
    """`key.inner: message` of the first problem that pydantic reports."""
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"]) or "the whole content"
    return f"{key}: {problem['msg']}"


def manifest_bytes(content: dict[str, Any], *, tools: dict[str, str] | None = None) -> bytes:
    """The bytes of a manifest file: `content` and its digest, with sorted keys.

    `tools` says which programs wrote the files. It is information for people: not part of the
    content or of its digest.
    """
    written = {"digest": sha256_of(content), **({"tools": tools} if tools else {}), **content}
    return (json.dumps(written, sort_keys=True, indent=1) + "\n").encode()


def load_manifest_file(path: DatasetPath, model: type[M]) -> M:
    """The verified content of a manifest file.

    Raises OSError if it cannot be read, and ValueError for content of another format or version,
    or that was damaged or edited. A caller prints `f"{path} {error}"`.
    """
    try:
        content = parse_json(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError("is not a JSON object")
    recorded = content.pop("digest", None)
    content.pop("tools", None)
    try:
        manifest = model.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise ValueError(f"has a wrong entry: {first_problem(error)}") from error
    # Computed from the file's keys, not from the model: a later version may add keys with defaults,
    # which the writer of this file did not know.
    digest = sha256_of(content)
    if digest != recorded:
        raise ValueError(f"records the digest {recorded!r}, but its content has {digest!r}")
    return manifest
