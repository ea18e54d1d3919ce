"""Section: the base of every section of the config."""

from collections.abc import Iterable
from typing import Any

from data_pipeline.storage.strict_model import StrictModel
from txl_dist.config.redaction import redact_field


class Section(StrictModel):
    """Frozen; no unknown keys, no conversion between types except from int to float."""

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        # Logs and tracebacks show the repr of a config, which may hold a server's password.
        return [(name, redact_field(name or "", value)) for name, value in super().__repr_args__()]
