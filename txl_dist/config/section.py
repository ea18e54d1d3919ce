"""Section: the base of every section of the config."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from data_pipeline.system.strict import StrictModel
from txl_dist.config.redaction import redact_field

PathText = Annotated[
    str, BeforeValidator(lambda path: str(path) if isinstance(path, Path) else path)
]
"""Text, because a config is YAML. In Python a pathlib.Path can be given."""


class Section(StrictModel):
    """Frozen; no unknown keys, no conversion between types except from int to float."""

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        # Logs and tracebacks show the repr of a config, which may hold a server's password.
        return [(name, redact_field(name or "", value)) for name, value in super().__repr_args__()]
