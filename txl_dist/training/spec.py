"""TrainSpec: everything a rank needs to take part in a run, as data that is sent as JSON.

`require_same_spec` verifies that all ranks run the same config on the same data with the same code.
Ranks on machines with different versions or data would otherwise train without any error, on
gradients of different computations.
"""

import hashlib
import uuid
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, Field

from txl_dist.config.data_config import PathText
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError
from txl_dist.runtime.process import LIBRARIES, source_digest

if TYPE_CHECKING:  # launchers use specs without importing torch
    from txl_dist.runtime.world import World
    from txl_dist.training.data import TrainingData


class TrainSpec(BaseModel):
    """The config of a run, and the options of the command line about resuming."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: RunConfig
    resume: PathText = "auto"
    """auto: resume from the newest intact checkpoint of the run directory, if there is one.
    never: refuse a directory that has checkpoints. Otherwise the path of a checkpoint; the same
    spec then continues from its own checkpoints."""
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
        """A spec that another process has sent. Raises ConfigError if it is invalid."""
        try:
            return cls.model_validate_json(text)
        except ValueError as error:
            raise ConfigError(f"not a TrainSpec: {error}") from None


def require_same_spec(config: RunConfig, data: "TrainingData", world: "World") -> None:
    """Raises ConfigError on every rank, listing what differs by rank. Collective."""
    local = {
        "txl-dist": version("txl-dist"),
        **{name: version(name) for name in LIBRARIES},
        "sources": source_digest()[:16],
        # The resolved config: overrides on the command line count too.
        "config": hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16],
        **data.digests,
    }
    specs = world.all_gather(local)
    lines = []
    for name in dict.fromkeys(name for spec in specs for name in spec):
        if len({spec.get(name) for spec in specs}) > 1:
            values = (f"rank {rank} {spec.get(name)}" for rank, spec in enumerate(specs))
            lines.append(f"\n  {name}: {', '.join(values)}")
    if lines:
        raise ConfigError(
            f"the ranks do not agree on code, config or data:{''.join(lines)}\nInstall the same "
            "version on all machines, and give every rank the same command and the same data "
            "(txl data verify DIR on each machine)"
        )
