"""RunConfig: one training run as frozen, checked data. The YAML file mirrors it field by field.

Reading files and command-line overrides is `config_file.py`; this module only says what a run is.
Every section refuses unknown keys. Nothing downstream edits a config or checks it again.
"""

import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from data_pipeline.storage.strict_model import StrictModel
from data_pipeline.storage.urls import is_url, shown
from txl_dist.config.deepspeed_keys import DECIDED_BY, READ_BY_DEEPSPEED
from txl_dist.config.redaction import is_secret_name, redact, redact_field
from txl_dist.model.config import ModelConfig

ONLY_CORPUS = "data"
"""Name of the corpus that `data.path` gives."""


class Section(StrictModel):
    """Frozen, no unknown keys, no silent conversion of types (an int may stand for a float)."""

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        # A config reaches logs and tracebacks by its repr, and may hold a server's password.
        return [(name, redact_field(name or "", value)) for name, value in super().__repr_args__()]


class CorpusConfig(Section):
    """One corpus of a mixture."""

    path: str
    """Directory that `txl prepare` wrote."""
    weight: float = Field(gt=0)
    """Its share of the tokens read is weight / sum of all weights."""


def _check_corpus_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
        raise ValueError(f"{name!r} is no name of a corpus; use letters, digits, - and _")
    if is_secret_name(name):
        raise ValueError(f"{name!r} reads like a secret and would be hidden in files; rename it")
    return name


CorpusName = Annotated[str, AfterValidator(_check_corpus_name)]


class DataConfig(Section):
    """What is read, and by how many lanes. Either `path` or `mixture`."""

    mixture: dict[CorpusName, CorpusConfig] | None = Field(default=None, min_length=1)
    """Several corpora of one tokenizer by name, as `{web: {path: data/web, weight: 3}, ...}`."""
    path: str | None = Field(default=None, validate_default=True)
    """Directory that `txl prepare` wrote, relative to the working directory."""
    train_split: str = "train"
    num_lanes: int = Field(default=16, ge=1)
    """Rows of the global batch; fixed for a run, whatever the number of ranks."""
    tgt_len: int = Field(default=128, ge=1)
    """Tokens of one segment: what a step reads from each lane."""
    reset: Literal["document", "stream"] = "document"
    """`document`: no token sees another document. `stream`: the paper's behaviour."""
    shuffle: Literal["blocks", "none"] = "blocks"
    """`none`: the corpus in order, cut into lanes as the paper's code does."""
    prefetch_segments: int = Field(default=16, ge=1)

    @field_validator("path")
    @classmethod
    def _require_path_or_mixture(cls, path: str | None, info: ValidationInfo) -> str | None:
        mixture = info.data.get("mixture", ...)  # absent if it is wrong, and that is said
        if path is None and mixture is None:
            raise ValueError(
                "is missing; give the directory that txl prepare wrote, or several as data.mixture"
            )
        if path is not None and mixture is not None and mixture is not ...:
            raise ValueError("is given beside data.mixture; set one of them to null")
        return path

    @property
    def corpora(self) -> dict[str, CorpusConfig]:
        """What is read, by name; `path` is a mixture of one."""
        return self.mixture or {ONLY_CORPUS: CorpusConfig(path=self.path or "", weight=1.0)}


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(default=2.5e-4, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    gradient_clipping: float = Field(default=0.25, ge=0)
    """Largest global L2 norm of the gradient; 0 does not clip."""
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    min_lr: float = Field(default=0.0, ge=0)
    """Where the cosine ends, at `training.num_steps`."""


class TrainingConfig(Section):
    """The loop: how long, in which pieces, and what is kept."""

    num_steps: int = Field(ge=1)
    micro_batch_lanes: int | None = Field(default=None, ge=1)
    """Lanes a rank computes at once; null is all of its lanes. Changes speed and memory only."""
    log_interval_steps: int = Field(default=10, ge=1)
    checkpoint_interval_steps: int = Field(default=500, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints kept, beside the best one."""
    rank_timeout_seconds: float = Field(default=300.0, gt=0)
    """How long a rank waits for the others before it gives up."""


class EvaluationConfig(Section):
    """Evaluation during training: `split` in `exact` mode every so many steps, and at the end."""

    split: str | None = "auto"
    """`auto`: the split `valid` where the data has it, else none. null: no evaluation."""
    path: str | None = None
    """Where the split is; null: the first corpus of `data` that has it."""
    interval_steps: int = Field(default=500, ge=1)
    batch_chunks: int = Field(default=8, ge=1)
    """Pieces of the split scored at once per rank."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Score only the beginning of the split; null scores all of it."""


class TrackingConfig(Section):
    """MLflow. It never holds up training, and training goes on without it."""

    enabled: bool = True
    uri: str | None = None
    """null: `sqlite:///mlflow.db` beside the run directories; else a server or sqlite URI."""
    experiment: str = Field(default="txl", max_length=250, pattern=r"^[\w/][\w .:@/+-]*$")

    @field_validator("uri")
    @classmethod
    def _require_server_or_database(cls, uri: str | None) -> str | None:
        if uri is not None and ("://" not in uri or uri.startswith("file:")):
            raise ValueError(
                f"{redact(uri)!r} is no tracking server or database; write null, "
                "sqlite:///PATH/mlflow.db or http://HOST:PORT (MLflow has no file store any more)"
            )
        return uri

    @field_validator("experiment")
    @classmethod
    def _reject_parent_directory(cls, experiment: str) -> str:
        if ".." in experiment.split("/"):
            raise ValueError(f"{experiment!r} must not hold '..'; it is a name, not a path")
        return experiment


class DeepSpeedConfig(Section):
    """ZeRO and a passthrough for keys this project does not own."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    extra: dict[str, Any] = Field(default={})
    """Merged into DeepSpeed's JSON; keys that the run's own settings decide are refused."""

    @model_validator(mode="after")
    def _reject_owned_keys(self) -> Self:
        problems = [*self._keys_refused(), *self._offload_refused()]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _keys_refused(self) -> Iterator[str]:
        for key in self.extra:
            if key in DECIDED_BY:
                yield (
                    f"extra.{key} would contradict {DECIDED_BY[key]}, which decides it; remove it "
                    f"and set {DECIDED_BY[key]}"
                )
            elif key not in READ_BY_DEEPSPEED:
                nearest = difflib.get_close_matches(key, READ_BY_DEEPSPEED, n=1)
                hint = f"did you mean extra.{nearest[0]}?" if nearest else "remove it"
                yield f"extra.{key} is no key of DeepSpeed's, which would ignore it; {hint}"
        zero = self.extra.get("zero_optimization", {})
        if not isinstance(zero, dict):
            yield f"extra.zero_optimization={zero!r} must be a mapping"
        elif "stage" in zero:
            yield "extra.zero_optimization.stage would contradict deepspeed.zero_stage; remove it"

    def _offload_refused(self) -> Iterator[str]:
        zero = self.extra.get("zero_optimization", {})
        zero = zero if isinstance(zero, dict) else {}
        offloads = sorted(key for key in zero if key.startswith("offload_"))
        at = f"at zero_stage={self.zero_stage}"
        if self.zero_stage == 3 and offloads:
            yield (
                f"extra.zero_optimization.{offloads[0]} {at} is not supported: a checkpoint would "
                "be loaded into copies. Remove it, or use zero_stage 1 or 2"
            )
        elif "offload_param" in offloads:
            yield (
                f"extra.zero_optimization.offload_param {at} would be ignored: DeepSpeed moves "
                "parameters at stage 3 only, where this is not supported. Remove it"
            )
        elif "offload_optimizer" in offloads and self.zero_stage == 0:
            yield (
                f"extra.zero_optimization.offload_optimizer {at} would be ignored: there is no "
                "partition to move. Remove it, or use zero_stage 1 or 2"
            )
        elif (
            "offload_optimizer" in offloads
            and self.extra.get("zero_force_ds_cpu_optimizer") is not False
        ):
            yield (
                "extra.zero_optimization.offload_optimizer is refused by DeepSpeed with the AdamW "
                "used here; add deepspeed.extra.zero_force_ds_cpu_optimizer=false, or remove it"
            )


class RayConfig(Section):
    """Supervision of `--on ray`."""

    max_restarts: int = Field(default=3, ge=0)
    """Times a run is restarted from its newest checkpoint after a rank died."""
    start_timeout_seconds: float = Field(default=600.0, gt=0)
    """How long Ray may take to start the ranks, at the beginning and after a rank died."""


Precision = Literal["fp32", "bf16"]


class RunConfig(Section):
    """A whole run. `model.vocab_size: 0` takes the vocabulary of the data."""

    directory: str
    """Where the run keeps its config, metrics, logs and checkpoints."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    precision: Precision = "fp32"
    """Of matrix products (`precision.py`); parameters, optimizer, memory and loss stay fp32."""
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
                f"{shown(directory)!r}: a run is written to a directory on a file system, not a "
                "URL. Give one that all ranks can reach, and copy it when the run has ended"
            )
        return directory

    @field_validator("precision", mode="before")
    @classmethod
    def _reject_fp16(cls, precision: Any) -> Any:
        if precision in ("fp16", "float16", "half", 16):
            raise ValueError(
                f"{precision!r} is not offered: its gradients overflow without loss scaling, and "
                "DeepSpeed has no fp16 on CPUs. Write bf16, as fast and with fp32's range, or fp32"
            )
        return precision

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
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
            raise ValueError("\n".join(problems))  # a line each, which `config_problems.py` splits
        return self

    @property
    def run_path(self) -> Path:
        return Path(self.directory)
