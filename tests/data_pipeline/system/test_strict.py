"""Strict JSON, strict models and manifest files: what is unknown is refused.

Manifests that are no JSON, edited or damaged: tests/data_pipeline/shards/test_manifest.py.
"""

import math
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import ValidationError

from data_pipeline.system.strict import (
    StrictModel,
    first_problem,
    load_manifest_file,
    manifest_bytes,
)
from data_pipeline.system.strict_json import canonical_json, parse_json, sha256_of


def test_the_digest_does_not_depend_on_the_order_of_keys() -> None:
    one, two = {"a": 1, "b": {"c": "é", "d": []}}, {"b": {"d": [], "c": "é"}, "a": 1}
    assert canonical_json(one) == '{"a":1,"b":{"c":"\\u00e9","d":[]}}'
    assert sha256_of(one) == sha256_of(two)
    assert sha256_of(one) != sha256_of({**one, "a": 2})


@pytest.mark.parametrize("text", ['{"k": 1, "k": 1}', b'[{"a": {"k": 1, "l": 2, "k": 3}}]'])
def test_a_key_twice_is_refused_at_any_depth(text: str | bytes) -> None:
    with pytest.raises(ValueError, match='key "k" twice in one object'):
        parse_json(text)


class Inner(StrictModel):
    loss: float = 0.0


class Outer(StrictModel):
    steps: int
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"steps": 1, "stesp": 2}', "stesp: Extra inputs are not permitted"),
        ('{"steps": "1"}', "steps: Input should be a valid integer"),
        ('{"steps": 1.0}', "steps: Input should be a valid integer"),
        ("{}", "steps: Field required"),
        ('{"steps": 1, "inner": {"loss": NaN}}', "inner.loss: Input should be a finite number"),
        ('{"steps": 1, "inner": {"loss": Infinity}}', "inner.loss: Input should be a finite"),
        ("[]", "the whole content: Input should be an object"),
    ],
)
def test_wrong_content_is_refused_with_the_key(content: str, problem: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Outer.model_validate_json(content)
    assert first_problem(refused.value).startswith(problem)


def test_a_model_is_frozen_and_refuses_a_nan_from_python_too() -> None:
    with pytest.raises(ValidationError):
        Inner(loss=math.nan)
    with pytest.raises(ValidationError, match="frozen"):
        Outer(steps=1).steps = 2  # type: ignore[misc]


class Small(StrictModel):
    format: Literal["small"] = "small"
    version: Literal[3] = 3
    loss: float
    note: str = ""


CONTENT: dict[str, Any] = {"format": "small", "version": 3, "loss": 1.5}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "other"}, "format: Input should be 'small'"),
        ({"version": 2}, "version: Input should be 3"),
        ({"loss": float("nan")}, "loss: Input should be a finite number"),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_entry_is_refused_although_the_digest_is_right(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(manifest_bytes(CONTENT))
    assert load_manifest_file(path, Small) == Small(loss=1.5)
    path.write_bytes(manifest_bytes({**CONTENT, **change}))
    with pytest.raises(ValueError, match=f"has a wrong entry: {reason}"):
        load_manifest_file(path, Small)
