"""RunConfig: one training run as frozen, checked data. The YAML file mirrors it field by field.

Reading files and command-line overrides is `config_file.py`; this module only says what a run is.
Every section refuses unknown keys. Nothing downstream edits a config or checks it again.
"""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from txl_dist.model.config import ModelConfig


class Section(BaseModel):
    """Frozen, no unknown keys, no silent conversion of types (an int may stand for a float)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class DataConfig(Section):
    """What is read, and by how many lanes."""

    path: str
    """Directory that `txl prepare` wrote, relative to the working directory."""
    train_split: str = "train"
    num_lanes: int = Field(16, ge=1)
    """Rows of the global batch; fixed for a run, whatever the number of ranks."""
    tgt_len: int = Field(128, ge=1)
    """Tokens of one segment: what a step reads from each lane."""
    reset: Literal["document", "stream"] = "document"
    """`document`: no token sees another document. `stream`: the paper's behaviour."""
    shuffle: Literal["blocks", "none"] = "blocks"
    """`none`: the corpus in order, cut into lanes as the paper's code does."""
    prefetch_segments: int = Field(4, ge=1)


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(2.5e-4, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    gradient_clipping: float = Field(0.25, ge=0)
    """Largest global L2 norm of the gradient; 0 does not clip."""
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = Field(0, ge=0)
    min_lr: float = Field(0.0, ge=0)
    """Where the cosine ends, at `training.num_steps`."""


class TrainingConfig(Section):
    """The loop: how long, in which pieces, and what is kept."""

    num_steps: int = Field(ge=1)
    micro_batch_lanes: int | None = Field(None, ge=1)
    """Lanes a rank computes at once; null is all of its lanes. Changes speed and memory, no number."""
    log_interval_steps: int = Field(10, ge=1)
    checkpoint_interval_steps: int = Field(500, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints kept, beside the best one."""
    rank_timeout_seconds: float = Field(300.0, gt=0)
    """How long a rank waits for the others before it gives up."""


class EvaluationConfig(Section):
    """Evaluation during training: `split` in `exact` mode every so many steps, and at the end."""

    split: str | None = None
    """null: no evaluation."""
    interval_steps: int = Field(500, ge=1)
    batch_pieces: int = Field(8, ge=1)
    """Pieces of the split scored at once per rank."""
    max_tokens: int | None = Field(None, ge=2)
    """Score only the beginning of the split; null scores all of it."""


class TrackingConfig(Section):
    """MLflow. It never holds up training, and training goes on without it."""

    enabled: bool = True
    uri: str | None = None
    """null: `sqlite:///mlflow.db` beside the run directories; else a server or sqlite URI."""
    experiment: str = "txl"


class DeepSpeedConfig(Section):
    """ZeRO and a passthrough for keys this project does not own."""

    zero_stage: Literal[0, 1, 2] = 1
    extra: dict[str, Any] = {}
    """Merged into DeepSpeed's JSON; keys that the run's own settings decide are refused."""


class RayConfig(Section):
    """Supervision of `--on ray`."""

    max_restarts: int = Field(3, ge=0)
    """Times a run is restarted from its newest checkpoint after a rank died."""


class RunConfig(Section):
    """A whole run. `model.vocab_size: 0` takes the vocabulary of the data."""

    directory: str
    """Where the run keeps its config, metrics, logs and checkpoints."""
    seed: int = Field(0, ge=0, lt=2**63)
    precision: Literal["fp32"] = "fp32"
    data: DataConfig
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        warmup, steps = self.optimizer.warmup_steps, self.training.num_steps
        if warmup > steps:
            raise ValueError(
                f"optimizer.warmup_steps={warmup} is longer than training.num_steps={steps}; lower it"
            )
        if self.optimizer.min_lr > self.optimizer.lr:
            raise ValueError(
                f"optimizer.min_lr={self.optimizer.min_lr} is above optimizer.lr={self.optimizer.lr}"
            )
        lanes, micro = self.data.num_lanes, self.training.micro_batch_lanes
        if micro is not None and micro > lanes:
            raise ValueError(
                f"training.micro_batch_lanes={micro} is above data.num_lanes={lanes}; use null"
            )
        return self

    @property
    def run_path(self) -> Path:
        return Path(self.directory)
