"""The sections `training`, `evaluation`, `tracking` and `ray`: the course of a run."""

from typing import Self

from pydantic import Field, field_validator, model_validator

from txl_dist.config.redaction import redact
from txl_dist.config.section import Section


class TrainingConfig(Section):
    """Length of the run, micro-batches, logging and checkpoints."""

    num_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the whole run, those before a resume included. Exactly one of `num_steps`,
    `num_tokens` and `num_epochs` sets the length of a run."""
    num_tokens: int | None = Field(default=None, ge=1)
    """Length in tokens of all lanes; rounded up to whole steps."""
    num_epochs: float | None = Field(default=None, gt=0)
    """Length in epochs of the training data; rounded up to whole steps."""
    micro_batch_lanes: int | None = Field(default=None, ge=1)
    """Lanes per micro-batch of a rank; null: all its lanes. Changes speed and memory only."""
    log_interval_steps: int = Field(default=10, ge=1)
    """Steps between two step lines; the last step always has one."""
    checkpoint_interval_steps: int = Field(default=500, ge=1)
    """Steps between two checkpoints; the last step and a stop request always save one."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep, in addition to the best one."""
    rank_timeout_seconds: float = Field(default=300.0, gt=0)
    """How long a rank waits in a collective before it fails."""

    @model_validator(mode="after")
    def _require_one_duration(self) -> Self:
        lengths = {name: getattr(self, name) for name in ("num_steps", "num_tokens", "num_epochs")}
        given = [f"{name}={value}" for name, value in lengths.items() if value is not None]
        if not given:
            raise ValueError("num_steps, num_tokens or num_epochs is missing: the length of a run")
        if len(given) > 1:
            raise ValueError(
                f"{' and '.join(given)} all set the length of the run; keep one "
                "and remove the others, or set them to null"
            )
        return self


class EvaluationConfig(Section):
    """Evaluation during training, in `exact` mode: every `interval_steps`, and at the end."""

    split: str | None = "auto"
    """`auto`: the split `valid` if the data has it. null: no evaluation."""
    path: str | None = None
    """Dataset of the split; null: the first corpus of `data` that has the split."""
    interval_steps: int = Field(default=500, ge=1)
    """Steps between two evaluations; the last step always has one."""
    batch_chunks: int = Field(default=8, ge=1)
    """Chunks of the split per batch, on each rank."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Score only this many tokens from the start of the split; null: all of it."""


class TrackingConfig(Section):
    """MLflow. Training never waits for it, and continues if it fails."""

    enabled: bool = True
    """Whether metrics are sent to MLflow; `metrics.jsonl` is written in either case."""
    uri: str | None = None
    """A server or sqlite URI; null: `mlflow.db` in the parent of the run directory."""
    experiment: str = Field(default="txl", max_length=250, pattern=r"^[\w/][\w .:@/+-]*$")
    """Name of the MLflow experiment that contains the run."""

    @field_validator("uri")
    @classmethod
    def _require_server_or_database(cls, uri: str | None) -> str | None:
        if uri is not None and ("://" not in uri or uri.startswith("file:")):
            raise ValueError(
                f"{redact(uri)!r} is not a tracking server or database; write null, "
                "sqlite:///PATH/mlflow.db or http://HOST:PORT (MLflow no longer has a file store)"
            )
        return uri

    @field_validator("experiment")
    @classmethod
    def _reject_parent_directory(cls, experiment: str) -> str:
        if ".." in experiment.split("/"):
            raise ValueError(f"{experiment!r} must not contain '..'; it is a name, not a path")
        return experiment


class RayConfig(Section):
    """Restarts and timeouts of `--on ray`."""

    max_restarts: int = Field(default=3, ge=0)
    """How often a run is restarted from its newest checkpoint after a rank died."""
    start_timeout_seconds: float = Field(default=600.0, gt=0)
    """How long Ray may take to start the ranks, at first and after a rank died."""
