"""StrictModel: the base of every JSON or YAML structure that this project reads.

Files are edited, truncated and copied between versions. A key that is not known, a number written
as text, or NaN is an error with the key's name, never a silent default.
"""

from pydantic import BaseModel, ConfigDict, ValidationError


class StrictModel(BaseModel):
    """Frozen; refuses unknown keys, values of another type, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def first_problem(error: ValidationError) -> str:
    """`key.inner: message` of the first problem that pydantic reports."""
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"]) or "the whole content"
    return f"{key}: {problem['msg']}"
