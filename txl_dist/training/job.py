"""TrainJob: everything a rank needs to take part in a run, as data that is sent as JSON."""

import uuid
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from txl_dist.config.data_config import PathText
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError


class TrainJob(BaseModel):
    """The config of a run, and the options of the command line about resuming."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: RunConfig
    resume: PathText = "auto"
    """auto: resume from the newest intact checkpoint of the run directory, if there is one.
    never: refuse a directory that has checkpoints. Otherwise the path of a checkpoint; the same job
    then continues from its own checkpoints."""
    allow_change: tuple[str, ...] = ()
    allow_data_change: bool = False
    strict: bool = False
    """Do not fall back to an older checkpoint when the newest is damaged."""
    force_unlock: bool = False
    """Start although another run holds the lock of the directory; that run is lost, or stops."""
    launch_id: str = Field(default_factory=lambda: uuid.uuid4().hex[:12])
    """Identifies this start of the run. Ray's restarts of ranks keep the id."""
    saved_file: str | None = None
    """Appears once this launch has saved a checkpoint; a restart then resumes from the newest."""
    stop_file: str | None = None
    """When this file appears, the ranks save and exit with code 75."""

    @property
    def run_path(self) -> Path:
        return self.config.run_path

    def to_json(self) -> str:
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """A job that another process has sent. Raises ConfigError if it is invalid."""
        try:
            return cls.model_validate_json(text)
        except ValueError as error:
            raise ConfigError(f"not a training job: {error}") from None
