"""RunConfig: the settings of one training run, frozen and checked. The YAML file has the same form.

The sections are in `data_config.py`, `training_config.py` and
`txl_dist/model/config.py`; `config_file.py` reads files and overrides. A section checks its own
settings, `RunConfig` compares sections with each other. Only what depends on the dataset or the
device is checked later (`training/compatibility.py`, `training/data.py`).
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from data_pipeline.system.sources import is_url, shown
from txl_dist.config.data_config import DataConfig, PathText, Section, expand_home, refuse
from txl_dist.config.training_config import (
    DeepSpeedConfig,
    DivergenceConfig,
    EvaluationConfig,
    OptimizerConfig,
    RayConfig,
    TrackingConfig,
    TrainingConfig,
)
from txl_dist.model.choices import RECIPES
from txl_dist.model.config import ModelConfig

Precision = Literal["fp32", "bf16"]


class RunConfig(Section):
    """All settings of a run. `model.vocab_size: 0` means the vocabulary size of the data."""

    directory: PathText
    """The run directory: config, metrics, logs and checkpoints."""
    init_from: Annotated[str | None, BeforeValidator(expand_home)] = None
    """A stored model from whose weights a new run starts: a run, a checkpoint, RUN/BEST, or a
    directory of `txl import`, `txl export` or transformers. Settings of `model` that the config
    leaves out are those of this model, whatever the recipe."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Determines the initial weights, the order of the data and the dropout masks."""
    precision: Precision = "fp32"
    """Precision of matrix products; parameters, optimizer and loss are always fp32."""
    data: DataConfig
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig
    divergence: DivergenceConfig = DivergenceConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    ray: RayConfig = RayConfig()

    @field_validator("directory")
    @classmethod
    def _reject_no_directory(cls, directory: str) -> str:
        if not directory.strip():
            raise ValueError("is empty; name a directory for the run, such as runs/NAME")
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
        rows, micro = self.data.rows, self.training.micro_batch_lanes
        segments = self.training.backprop_segments
        refuse(
            *self.optimizer.checks_with(num_steps=self.num_steps),
            *self.optimizer.checks_at_stage(self.deepspeed.zero_stage),
            (
                self.model.vocab_size is None,
                "model.vocab_size=null is a model of vectors, for a loop of your own; a run "
                "reads token ids: use 0, the vocabulary size of the data",
            ),
            (
                self.data.num_lanes % rows > 0,
                f"data.lanes_per_step={rows} does not divide data.num_lanes="
                f"{self.data.num_lanes}: every step reads as many lanes; use a multiple, or "
                "lanes_per_step=null",
            ),
            (
                micro is not None and micro > rows,
                f"training.micro_batch_lanes={micro} is above {self.data.rows_setting}={rows}; "
                "use null",
            ),
            (
                bool(self.training.compile) and self.deepspeed.zero_stage == 3,
                "training.compile is not supported at deepspeed.zero_stage=3: there DeepSpeed "
                "gathers weights in hooks inside the layers, which end every compiled graph; "
                "use stage 0, 1 or 2",
            ),
            (
                self.data.tgt_len % segments > 0,
                f"data.tgt_len={self.data.tgt_len} cannot be read as training."
                f"backprop_segments={segments} segments of equal length; use a multiple",
            ),
            (
                segments == 1 and self.model.memory_facts.adds_tokens,
                f"model.memory={self.model.memory} needs training.backprop_segments of at "
                "least 2: only the losses of later segments of a step train what a segment "
                "writes",
            ),
            (
                segments > 1 and not self.model.has_memory,
                "training.backprop_segments needs a memory, through which gradients pass: set "
                "model.mem_len to at least 1, or backprop_segments=1",
            ),
        )
        return self

    @property
    def warnings(self) -> list[str]:
        """What is legal, and probably not meant."""
        warnings = list(self.optimizer.rate_warnings(d_model=self.model.d_model))
        of_recipe = ModelConfig.of_recipe(self.model.recipe)
        names = {name for recipe in RECIPES.values() for name in recipe}
        own = [name for name in names if getattr(self.model, name) != getattr(of_recipe, name)]
        # A file with every setting, such as a run's config.yaml, is not changed by another recipe.
        if self.init_from is None and len(own) > 3 / 4 * len(names):
            warnings.append(
                f"model.recipe={self.model.recipe} has nearly no effect: {len(own)} of the "
                f"{len(names)} settings of `model` that a recipe decides have other values. Remove "
                "them from the file; txl config init NAME --recipe RECIPE writes one without them"
            )
        return warnings

    @property
    def segment_len(self) -> int:
        """Tokens of a lane that the model reads at a time."""
        return self.data.tgt_len // self.training.backprop_segments

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.training.num_steps

    @property
    def run_path(self) -> Path:
        return Path(self.directory)
