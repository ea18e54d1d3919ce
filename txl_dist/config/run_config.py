"""RunConfig: the settings of one training run, frozen and checked. The YAML file has the same form.

Reading files and command-line overrides is in `config_file.py`, the refusals for `deepspeed.extra`
in `deepspeed_keys.py`. A config is checked once, here; no other code checks or edits it.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from data_pipeline.storage.strict_model import StrictModel
from data_pipeline.storage.urls import is_url, shown
from txl_dist.config.deepspeed_keys import refused_keys, refused_offload
from txl_dist.config.redaction import redact, redact_field
from txl_dist.model.config import ModelConfig

SINGLE_CORPUS_NAME = "data"
"""Name of the corpus when `data.path` is set instead of `data.mixture`."""


class Section(StrictModel):
    """Frozen; no unknown keys, no conversion between types except from int to float."""

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        # Logs and tracebacks show the repr of a config, which may hold a server's password.
        return [(name, redact_field(name or "", value)) for name, value in super().__repr_args__()]


class CorpusConfig(Section):
    """One corpus of a mixture."""

    path: str
    """Directory that `txl prepare` wrote."""
    weight: float = Field(gt=0)
    """The corpus provides weight / (sum of all weights) of the tokens read."""


def _require_corpus_name(name: str) -> str:
    # No dots: `data.mixture.NAME.weight=2` must be a valid override.
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
        raise ValueError(f"{name!r} cannot name a corpus; use letters, digits, - and _")
    return name


CorpusName = Annotated[str, AfterValidator(_require_corpus_name)]


class DataConfig(Section):
    """The dataset or datasets, and how lanes read them. Set either `path` or `mixture`."""

    # `mixture` comes first, because the validator of `path` needs its value.
    mixture: dict[CorpusName, CorpusConfig] | None = Field(default=None, min_length=1)
    """Several corpora with the same tokenizer, e.g. `{web: {path: data/web, weight: 3}, ...}`."""
    path: str | None = Field(default=None, validate_default=True)
    """Directory that `txl prepare` wrote, relative to the working directory."""
    train_split: str = "train"
    """Split to train on, of every corpus."""
    num_lanes: int = Field(default=16, ge=1)
    """Rows of the global batch. Does not depend on the number of ranks, which share the lanes."""
    tgt_len: int = Field(default=128, ge=1)
    """Tokens per segment: a step reads one segment of each lane."""
    reset: Literal["document", "stream"] = "document"
    """`document`: no token sees another document. `stream`: memory continues, as in the paper."""
    shuffle: Literal["blocks", "none"] = "blocks"
    """`blocks`: shuffle blocks of whole documents, each epoch in another order. `none`: the corpus
    in order, cut into one contiguous part per lane, as in the paper's code."""
    prefetch_segments: int = Field(default=16, ge=1)
    """Size of the queue of segments that a reader thread fills."""

    @field_validator("path")
    @classmethod
    def _require_path_or_mixture(cls, path: str | None, info: ValidationInfo) -> str | None:
        mixture = info.data.get("mixture", ...)  # Absent if it is invalid, which is reported.
        if path is None and mixture is None:
            raise ValueError(
                "is missing; set it to a directory that txl prepare wrote, or set data.mixture"
            )
        if path is not None and mixture is not None and mixture is not ...:
            raise ValueError("is set, but so is data.mixture; set one of them to null")
        return path

    @property
    def corpora(self) -> dict[str, CorpusConfig]:
        """All corpora by name; `path` counts as a mixture of one."""
        return self.mixture or {SINGLE_CORPUS_NAME: CorpusConfig(path=self.path or "", weight=1.0)}


class OptimizerConfig(Section):
    """AdamW and the schedule of its learning rate."""

    # Defaults are those of the paper's base models: Adam, lr 2.5e-4, clipping at 0.25.
    lr: float = Field(default=2.5e-4, gt=0)
    """Learning rate after the warm-up, the highest of the run."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay per step of the running mean of gradients."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay per step of the running mean of squared gradients."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of the update, so that it is never 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay, of all parameters; 0 is Adam."""
    gradient_clipping: float = Field(default=0.25, ge=0)
    """Largest global L2 norm of the gradient; 0 does not clip."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate after the warm-up: half a cosine period down to `min_lr`, or constant `lr`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start in which the learning rate rises linearly from 0 to `lr`."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the cosine, at step `training.num_steps`."""


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


class DeepSpeedConfig(Section):
    """The ZeRO stage, and DeepSpeed options that no setting of ours decides."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """What ranks shard: 0 nothing, 1 the optimizer state, 2 also gradients, 3 also parameters."""
    extra: dict[str, Any] = Field(default={})
    """Merged into DeepSpeed's JSON. `deepspeed_keys.py` decides which keys are refused."""

    @model_validator(mode="after")
    def _reject_owned_keys(self) -> Self:
        problems = list(refused_keys(self.extra))
        if isinstance(self.extra.get("zero_optimization", {}), dict):
            problems += refused_offload(self.extra, zero_stage=self.zero_stage)
        if problems:
            raise ValueError("\n".join(problems))
        return self


class RayConfig(Section):
    """Restarts and timeouts of `--on ray`."""

    max_restarts: int = Field(default=3, ge=0)
    """How often a run is restarted from its newest checkpoint after a rank died."""
    start_timeout_seconds: float = Field(default=600.0, gt=0)
    """How long Ray may take to start the ranks, at first and after a rank died."""


Precision = Literal["fp32", "bf16"]


class RunConfig(Section):
    """All settings of a run. `model.vocab_size: 0` means the vocabulary size of the data."""

    directory: str
    """The run directory: config, metrics, logs and checkpoints."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Determines the initial weights, the order of the data and the dropout masks."""
    precision: Precision = "fp32"
    """Precision of matrix products; parameters, optimizer, memory and loss are always fp32."""
    data: DataConfig
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    ray: RayConfig = RayConfig()

    @field_validator("directory")
    @classmethod
    def _reject_url(cls, directory: str) -> str:
        if is_url(directory):
            raise ValueError(
                f"{shown(directory)!r}: a run needs a directory on a file system, not a URL. Give "
                "one that all ranks can reach, and copy it when the run has ended"
            )
        return directory

    # "before": otherwise pydantic would only list the legal values, without the reason.
    @field_validator("precision", mode="before")
    @classmethod
    def _reject_fp16(cls, precision: Any) -> Any:
        if precision in ("fp16", "float16", "half", 16):
            raise ValueError(
                f"{precision!r} is not supported: it needs loss scaling, and DeepSpeed has "
                "no fp16 on CPUs. Write bf16, which is as fast and has the range of fp32, or fp32"
            )
        return precision

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        # Collect all contradictions, so that one correction is enough.
        problems = []
        warmup, steps = self.optimizer.warmup_steps, self.training.num_steps
        if warmup > steps:
            problems.append(
                f"optimizer.warmup_steps={warmup} is longer than training.num_steps={steps}; "
                "lower it"
            )
        min_lr, lr = self.optimizer.min_lr, self.optimizer.lr
        if min_lr > lr:
            problems.append(f"optimizer.min_lr={min_lr} is above optimizer.lr={lr}; lower it")
        lanes, micro = self.data.num_lanes, self.training.micro_batch_lanes
        if micro is not None and micro > lanes:
            problems.append(
                f"training.micro_batch_lanes={micro} is above data.num_lanes={lanes}; use null"
            )
        if problems:
            raise ValueError("\n".join(problems))  # `problems.explain` splits the lines.
        return self

    @property
    def run_path(self) -> Path:
        return Path(self.directory)
