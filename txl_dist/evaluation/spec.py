"""What is evaluated: a model, a split, and the settings that determine the score.

`evaluation_spec` builds a spec with the settings of training as defaults. `distributed.evaluate`
scores it. A spec contains paths and settings only, so it can be sent to a worker, which opens it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import get_args

import torch

from data_pipeline.shards.manifest import load_manifest, open_tokenizer
from data_pipeline.shards.shard_reader import TokenSource, open_split
from data_pipeline.streams.segments import Reset, read_range
from data_pipeline.system.remote_path import DatasetPath, dataset_path
from txl_dist.checkpoint.tensors import Weights
from txl_dist.config.run_config import Precision
from txl_dist.convert.stored_model import find_model
from txl_dist.errors import CheckpointError, ConfigError, DataError
from txl_dist.evaluation.scoring import EvaluationChunk, Mode, Scorer, plan_chunks
from txl_dist.model.config import ModelConfig
from txl_dist.model.memory import memory_kind
from txl_dist.runtime.device import EXACT_THREADS, default_device
from txl_dist.runtime.process import keep_freed_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSettings:
    """Everything that determines the score, except the weights and the text."""

    split: str
    mode: Mode
    tgt_len: int
    mem_len: int
    clamp_len: int | None
    same_length: bool
    reset: Reset
    precision: Precision = "fp32"
    max_tokens: int | None = None
    """Use only this many tokens from the start of the split."""

    def __post_init__(self) -> None:
        """Raises ValueError. What depends on the model is checked with it (`model_config`)."""
        for name, minimum in (("tgt_len", 1), ("mem_len", 0), ("clamp_len", 1), ("max_tokens", 2)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < minimum):
                raise ValueError(f"{name}={value!r} must be a whole number of at least {minimum}")
        for name, literal in (("mode", Mode), ("reset", Reset), ("precision", Precision)):
            if (value := getattr(self, name)) not in get_args(literal):
                raise ValueError(f"{name}={value!r} must be one of {', '.join(get_args(literal))}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSpec:
    """What a worker needs to score chunks: paths and settings. Can be sent to another process."""

    checkpoint: Path
    """A checkpoint or the directory of an exported model."""
    data: DatasetPath
    settings: EvaluationSettings
    batch_chunks: int
    weights: Weights = "auto"
    num_ranks: int = 1
    """The chunks are divided into batches as `evaluate_on_ranks` does it on this many ranks: the
    composition of a batch may change the last bit of a sum."""
    num_threads: int = EXACT_THREADS
    digest: str = ""
    """Digest of the model, set by `plan_spec`. Later the path may hold another model."""

    def __post_init__(self) -> None:
        """`checkpoint` and `data` can also be given as text. Raises ValueError."""
        object.__setattr__(self, "checkpoint", Path(self.checkpoint))
        object.__setattr__(self, "data", dataset_path(self.data))
        if self.batch_chunks < 1:
            raise ValueError(f"batch={self.batch_chunks} must be at least 1")

    def model_config(self, trained: ModelConfig) -> ModelConfig:
        """The trained architecture with the memory options of this evaluation.

        Raises ValueError for a combination that the model does not support.
        """
        settings = self.settings
        if trained.encoding.needs_clamp_len and settings.clamp_len != trained.clamp_len:
            raise ValueError(
                f"clamp_len={settings.clamp_len}, but the model has learned a vector for each "
                f"distance up to {trained.clamp_len}; leave clamp_len as trained"
            )
        return replace(
            trained,
            mem_len=settings.mem_len,
            clamp_len=settings.clamp_len,
            same_length=settings.same_length,
        )

    def open(self) -> Scorer:
        """Load model and split.

        Raises CheckpointError, also if the path has another model than when it was planned;
        DataError if the tokenizers differ.
        """
        keep_freed_memory()
        # The tokenizer of the dataset serves models without one; check_data has compared the sizes.
        trained = find_model(self.checkpoint, weights=self.weights)
        manifest = load_manifest(self.data)
        trained.check_data(manifest, self.data)
        model, tokenizer = trained.load(self.model_config(trained.config))
        # After loading: then it is known which model was loaded.
        expected = self.digest or trained.digest
        if find_model(self.checkpoint, weights=self.weights).digest != expected:
            raise CheckpointError(
                f"{self.checkpoint} is another model than when this evaluation was planned: its "
                "run went back and saved this step again, or the path was replaced. Run the "
                "command again"
            )
        for name, parameter in model.named_parameters():
            if not parameter.isfinite().all():
                raise CheckpointError(
                    f"{self.checkpoint}: weight {name} has values that are NaN or Inf, so every "
                    "score would be NaN. Use an earlier checkpoint: txl checkpoint list RUN"
                )
        tokenizer = tokenizer or open_tokenizer(self.data, manifest)
        return Scorer(
            model=model.to(default_device()),
            source=open_split(self.data, self.settings.split, manifest=manifest),
            tgt_len=self.settings.tgt_len,
            reset=self.settings.reset,
            precision=self.settings.precision,
            batch_chunks=self.batch_chunks,
            byte_counts_V=torch.from_numpy(tokenizer.token_bytes()),
        )


def evaluation_spec(
    checkpoint: str | Path,
    data: str | DatasetPath,
    *,
    split: str = "valid",
    mode: Mode = "exact",
    tgt_len: int | None = None,
    mem_len: int | None = None,
    clamp_len: int | None = None,
    same_length: bool = False,
    batch: int = 8,
    precision: Precision = "fp32",
    max_tokens: int | None = None,
    weights: Weights = "auto",
) -> EvaluationSpec:
    """An evaluation with the settings of training, except for the options that are not None.

    `clamp_len` 0 means no clamping, `batch` is in chunks. Raises CheckpointError if no model is
    there, ConfigError if the options do not fit the model.
    """
    stored = find_model(checkpoint, weights=weights)
    trained = stored.config
    try:  # Here, and not on the workers, so that wrong options start nothing.
        new_mem_len = trained.with_mem_len(mem_len).tokens_kept
        read_len = stored.tgt_len if tgt_len is None else tgt_len
        is_unbounded = memory_kind(trained).receptive_tokens(read_len) is None
        if mode == "fast" and is_unbounded:
            raise ValueError(
                f"mode=fast would be exact for memory={trained.memory} read in segments of "
                f"{read_len} tokens, which has no shorter context; omit the option"
            )
        settings = EvaluationSettings(
            split=split,
            mode=mode,
            tgt_len=read_len,
            mem_len=new_mem_len,
            # In a config, no clamping is null, which is here the setting of training.
            clamp_len=trained.clamp_len if clamp_len is None else (clamp_len or None),
            # mem_len 0 on a model trained with same_length: the option needs a memory.
            same_length=same_length or (trained.same_length and new_mem_len != 0),
            reset=stored.reset,
            precision=precision,
            max_tokens=max_tokens,
        )
        spec = EvaluationSpec(
            checkpoint=stored.path,
            data=dataset_path(data),
            settings=settings,
            batch_chunks=batch,
            weights=stored.weights,
        )
        spec.model_config(trained)
    except ValueError as error:
        raise ConfigError(f"{stored.path}: {error}") from None
    return spec


SMALLEST = {"tgt_len": 1, "mem_len": 0, "clamp_len": 0}
"""The options that can be swept, and the smallest value of each. clamp_len 0: no clamping."""


def parse_sweep(texts: Sequence[str]) -> dict[str, list[int]]:
    """Values by option. Each text has one or more assignments such as `mem_len=0,128,640`.

    Raises ConfigError naming the assignment that is wrong.
    """
    values: dict[str, list[int]] = {}
    for assignment in " ".join(texts).split():
        name, _, listed = assignment.partition("=")
        numbers = [int(number) if number.isdecimal() else -1 for number in listed.split(",")]
        is_distinct = name not in values and len(set(numbers)) == len(numbers)
        if name not in SMALLEST or min(numbers) < SMALLEST[name] or not is_distinct:
            raise ConfigError(
                f"--sweep {assignment!r}: expected one of {', '.join(SMALLEST)} and all its "
                "values, different whole numbers (tgt_len at least 1), as in "
                "--sweep mem_len=0,128,640 --sweep clamp_len=0,400"
            )
        values[name] = numbers
    return values


def combinations(values: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """Every combination of the values, the last option varying fastest."""
    return [dict(zip(values, each, strict=True)) for each in product(*values.values())]


def plan_evaluation(
    source: TokenSource, settings: EvaluationSettings, model: ModelConfig
) -> list[EvaluationChunk]:
    """The chunks of a split for this model. Raises DataError if the split has no target."""
    num_tokens = int(source.block_tokens.sum())
    num_targets = min(num_tokens, settings.max_tokens or num_tokens) - 1
    if num_targets < 1:
        raise DataError(
            f"split {settings.split} holds {num_tokens} tokens; scoring needs at least 2. Prepare "
            f"more text, or give it a larger share: txl prepare ... --split {settings.split}=0.1"
        )

    # Reads the age of one token per chunk: those of a whole split might not fit in RAM.
    def document_start(position: int) -> int:
        _, age = read_range(source, position, position + 1)
        return position - int(age[0])

    context = context_tokens(settings, model)
    knows_start = context is not None or model.memory_facts.documents_are_independent
    return plan_chunks(
        num_targets=num_targets,
        tgt_len=settings.tgt_len,
        context_tokens=context,
        document_start=document_start if settings.reset == "document" and knows_start else None,
    )


def context_tokens(settings: EvaluationSettings, model: ModelConfig) -> int | None:
    """The tokens that are read before a chunk; None: there is no limit within a document.

    Mode `fast` has the context of a model of one layer, and is not exact.
    """
    model = replace(model, mem_len=settings.mem_len, same_length=settings.same_length)
    if settings.mode == "fast":
        model = replace(model, n_layer=1, mem_shares=())
    return memory_kind(model).receptive_tokens(settings.tgt_len)
