"""The sections `training`, `evaluation`, `tracking` and `ray`: the course of a run."""

from typing import Literal

from pydantic import Field, field_validator

from txl_dist.config.redaction import redact
from txl_dist.config.section import Section


class TrainingConfig(Section):
    """Length of the run, micro-batches, logging and checkpoints."""

    num_steps: int = Field(ge=1)
    """Optimizer steps of the whole run, those before a resume included."""
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
    compile: bool = False
    """Compile the layers with torch.compile at the start, a minute or more; stages 0 to 2."""
    activation_checkpointing: bool = False
    """Compute each layer's activations again in backward: less memory, more time, same numbers."""
    memory_dtype: Literal["fp32", "bf16"] = "fp32"
    """Storage of the recurrent memory. bf16 takes half the bytes and rounds the hidden states."""
    memory_device: Literal["default", "cpu"] = "default"
    """Where the recurrent memory is stored: with the weights, or on the host. Same numbers."""
    statistics_interval_steps: int | None = Field(default=None, ge=1)
    """Steps between two lines with norms of weights, gradients and updates by layer; null: none."""
    profile_steps: tuple[int, int] | None = None
    """First and last step of a trace by torch.profiler in RUN/profile; null: none."""
    profile_ranks: tuple[int, ...] = (0,)
    """Ranks that write a trace."""

    @field_validator("profile_steps")
    @classmethod
    def _require_rising_steps(cls, steps: tuple[int, int] | None) -> tuple[int, int] | None:
        if steps is not None and not 1 <= steps[0] <= steps[1]:
            raise ValueError(
                f"{list(steps)} must be the first and the last step to profile, from 1 on; write "
                "for example [100, 104]"
            )
        return steps


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
