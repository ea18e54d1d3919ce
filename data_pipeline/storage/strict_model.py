"""StrictModel: the base class of every JSON or YAML structure that this project reads.

Files are edited, truncated and copied between versions. An unknown key, a number written as text
and NaN are errors that name the key, never a silent default.
"""

from pydantic import BaseModel, ConfigDict, ValidationError


class StrictModel(BaseModel):
    """A frozen pydantic model without unknown keys, type coercion, NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def first_problem(error: ValidationError) -> str:
    """`key.inner: message` of the first problem that pydantic reports."""
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"]) or "the whole content"
    return f"{key}: {problem['msg']}"
