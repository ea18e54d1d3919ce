"""TrainJob: all a rank needs to know to take part in a run. Plain data, safe to send anywhere."""

import uuid
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError


class TrainJob(BaseModel):
    """A run as it was asked for: the config, and what the command line says about resuming."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: RunConfig
    resume: str = "auto"
    """auto: go on from the run directory's newest good checkpoint, if any. never: refuse to touch a
    directory that has one. Else the path of a checkpoint."""
    allow_change: tuple[str, ...] = ()
    allow_data_change: bool = False
    strict: bool = False
    """Do not fall back to an older checkpoint when the newest is damaged."""
    launch_id: str = Field(default_factory=lambda: uuid.uuid4().hex[:12])
    """Identifies this start of the run. Ray's restarts of ranks keep the id."""
    saved_file: str | None = None
    """Appears once this launch has saved a checkpoint; a restart then resumes from the newest."""
    stop_file: str | None = None
    """When this file appears, the ranks save and end with exit code 75."""

    @property
    def run_path(self) -> Path:
        return self.config.run_path

    def to_json(self) -> str:
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The job another process described. Raises ConfigError if it is none."""
        try:
            return cls.model_validate_json(text)
        except ValueError as error:
            raise ConfigError(f"not a training job: {error}") from None
