"""What a StrictModel refuses, and how its first problem is named."""

import math

import pytest
from pydantic import ValidationError

from data_pipeline.storage.strict_model import StrictModel, first_problem


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


def test_a_nan_from_python_is_refused_too() -> None:
    with pytest.raises(ValidationError):
        Inner(loss=math.nan)


def test_a_model_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Outer(steps=1).steps = 2  # type: ignore[misc]
