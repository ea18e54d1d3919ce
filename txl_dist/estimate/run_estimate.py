"""The estimate of one run for several numbers of GPUs, and the text that `txl estimate` prints.

Bytes are those of a dry run and of DeepSpeed's buffers (`rank_bytes.py`). Time is that of the
matrix products at an assumed share of the peak, which is measured on a CPU; communication, failures
and saves are not in it (docs/scaling.md).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch

from data_pipeline.shards.manifest import MANIFEST_NAME
from data_pipeline.system.remote_path import dataset_path
from txl_dist.config.run_config import Precision, RunConfig
from txl_dist.errors import ConfigError
from txl_dist.estimate.dry_run import Device, dry_run, tail_rows
from txl_dist.estimate.rank_bytes import (
    FP32_BYTES,
    ModelNeeds,
    RankBytes,
    RankPeak,
    ZeroSettings,
)
from txl_dist.model.flops import training_flops
from txl_dist.model.memory import memory_kind
from txl_dist.runtime.device import TORCH_DTYPE
from txl_dist.training.data import first_phase, open_corpora
from txl_dist.training.speed import device_peak_flops

STAGES = (0, 1, 2, 3)
DAY_SECONDS = 86400.0
PEAK_TFLOPS = {"bf16": 312.0, "fp32": 19.5}
"""By `precision`: one NVIDIA A100, from its data sheet (dense bf16; fp32 without TF32)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """One kind of machine, which need not be this one."""

    device: Device = "cuda"
    peak_tflops: float | None = None
    """Peak of one rank; None: on a GPU `PEAK_TFLOPS` of the run's precision, on a CPU that of this
    machine, measured."""
    utilisation: float = 0.3
    """Share of the peak that a step reaches (MFU)."""
    lanes_per_gpu: int | None = None
    """The batch grows with the GPUs; None: `data.num_lanes` is the same for all."""

    def peak(self, precision: Precision) -> float:
        """TFLOP/s of one rank at the peak."""
        return self.peak_tflops or (
            PEAK_TFLOPS[precision] if self.device == "cuda" else _cpu_tflops(precision)
        )


@cache
def _cpu_tflops(precision: Precision) -> float:
    return device_peak_flops(torch.device("cpu"), TORCH_DTYPE[precision]) / 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """Read from the datasets of a config or, if they do not exist, from the config alone."""

    vocab_size: int
    num_steps: int | None
    """`training.num_steps`; None: the run has a length in tokens."""
    num_tokens: float | None = None
    """Length of the run in tokens of all lanes; None: unknown without the data."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Read the manifests of the datasets, if they are there.

        Raises ConfigError if the vocabulary is unknown, DataError for a damaged dataset.
        """
        vocab_size, data = config.model.vocab_size, config.data
        num_tokens: float | None = config.training.num_tokens
        paths = [dataset_path(corpus.path) for corpus in data.corpora.values()]
        if all(not isinstance(path, Path) or (path / MANIFEST_NAME).exists() for path in paths):
            corpora = open_corpora(data)
            vocab_size = corpora[0].manifest.vocab_size
            if config.training.num_epochs is not None:
                phase = first_phase(corpora, num_lanes=data.num_lanes)
                epoch_tokens = phase.plan(tgt_len=data.tgt_len).num_tokens
                num_tokens = config.training.num_epochs * epoch_tokens
        elif not vocab_size:
            listed = ", ".join(corpus.path for corpus in data.corpora.values())
            raise ConfigError(
                f"model.vocab_size=0 means that of the data, but {listed} has no manifest. Add "
                "model.vocab_size=N, or prepare the data first (txl prepare)"
            )
        return cls(
            vocab_size=vocab_size, num_steps=config.training.num_steps, num_tokens=num_tokens
        )

    def steps_of_run(self, *, tokens_per_step: int) -> int | None:
        """Optimizer steps, with this many tokens per step."""
        if self.num_steps is not None or self.num_tokens is None:
            return self.num_steps
        return math.ceil(self.num_tokens / tokens_per_step)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleEstimate:
    """The run on one number of GPUs."""

    gpus: int
    num_lanes: int
    lanes_per_rank: int
    micro_batches: int
    padded_share: float
    """Share of the computed rows that are padding, because the lanes do not divide evenly."""
    stages: dict[int, RankBytes]
    """By ZeRO stage; without the stages that the optimizer does not support."""
    checkpoint_bytes: int
    step_seconds: float
    tokens_per_second: float
    """Summed over all ranks."""
    num_steps: int | None
    """Steps of the whole run; None: they depend on a dataset that does not exist."""
    days: float | None
    """Duration of the whole run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEstimate:
    """A run, at several scales."""

    num_parameters: int
    flops_per_token: float
    """Forward and backward, with a full memory."""
    zero_stage: int
    max_ranks: int | None
    """The number of lanes; None if lanes grow with the ranks."""
    scales: list[ScaleEstimate]

    def to_json(self) -> dict[str, Any]:
        content = asdict(self)
        content["legal_world_sizes"] = {"minimum": 1, "maximum": content.pop("max_ranks")}
        for scale, uses in zip(content["scales"], self.scales, strict=True):
            scale["stages"] = {
                stage: {"memory": {**asdict(use), "device": use.device}}
                for stage, use in uses.stages.items()
            }
        return content


def estimate_run(
    config: RunConfig, facts: DataFacts, *, gpus: Sequence[int], assumptions: Assumptions
) -> RunEstimate:
    """Estimate `config` on each number of GPUs. Raises ConfigError for more GPUs than lanes."""
    estimator = _Estimator(config, facts, assumptions)
    if max(gpus) > (lanes := estimator.num_lanes(max(gpus)) // config.data.num_turns):
        raise ConfigError(
            f"{max(gpus)} GPUs for {config.data.rows_setting}={lanes}: every rank needs a lane, so "
            f"this config runs on 1 to {lanes} GPUs. To estimate a larger batch, add "
            f"{config.data.rows_setting}={max(gpus)}, or --lanes-per-gpu 1 for a batch that grows "
            "with the GPUs"
        )
    scales = [estimator.scale(num_gpus) for num_gpus in gpus]
    return RunEstimate(
        num_parameters=estimator.num_parameters,
        flops_per_token=estimator.flops_per_token,
        zero_stage=config.deepspeed.zero_stage,
        max_ranks=None if assumptions.lanes_per_gpu else config.data.rows,
        scales=scales,
    )


class _Estimator:
    def __init__(self, config: RunConfig, facts: DataFacts, assumptions: Assumptions) -> None:
        try:
            model = replace(config.model, vocab_size=facts.vocab_size)
        except ValueError as error:
            raise ConfigError(f"model, with {facts.vocab_size:,} token ids: {error}") from None
        self._config = config.model_copy(update={"model": model})
        self._facts, self._assumptions = facts, assumptions
        self._models: dict[int, ModelNeeds] = {}
        dtype = TORCH_DTYPE[config.training.memory_dtype]
        state = memory_kind(model).empty(1, dtype=dtype, device="meta")
        self._lane_bytes = state.bytes_per_lane
        self._lane_elements = sum(tensor.numel() for tensor in state.row(0).values())
        lanes, tgt_len = config.data.rows, config.data.tgt_len
        tails = tail_rows(model, num_tokens=lanes * tgt_len)
        flops = training_flops(
            model,
            num_lanes=lanes,
            tgt_len=tgt_len,
            tail_rows=tails,
            num_segments=config.training.backprop_segments,
        )
        self.flops_per_token = flops / (lanes * tgt_len)

    def num_lanes(self, gpus: int) -> int:
        per_gpu = self._assumptions.lanes_per_gpu
        data = self._config.data
        return data.num_lanes if per_gpu is None else per_gpu * gpus * data.num_turns

    @property
    def num_parameters(self) -> int:
        """Call `scale` before."""
        return next(iter(self._models.values())).num_parameters

    def scale(self, gpus: int) -> ScaleEstimate:
        config, lanes = self._config, self.num_lanes(gpus)
        lanes_per_rank, turns = math.ceil(lanes / gpus), config.data.num_turns
        step_lanes, rank_rows = lanes // turns, math.ceil(lanes_per_rank / turns)
        rows = min(rank_rows, config.training.micro_batch_lanes or rank_rows)
        micro_batches = math.ceil(rank_rows / rows)
        stages = {
            stage: self._peak(gpus, stage, rows, micro_batches)
            for stage in STAGES
            if not any(config.optimizer.problems_at_stage(stage))
        }
        # Recomputing is a second forward, a third of forward and backward.
        recompute = 4 / 3 if config.training.activation_checkpointing else 1.0
        rank_tokens = rows * micro_batches * config.data.tgt_len
        seconds = rank_tokens * self.flops_per_token * recompute
        seconds /= self._assumptions.peak(config.precision) * 1e12 * self._assumptions.utilisation
        steps = self._facts.steps_of_run(tokens_per_step=step_lanes * config.data.tgt_len)
        model = self._models[rows]
        return ScaleEstimate(
            gpus=gpus,
            num_lanes=lanes,
            lanes_per_rank=lanes_per_rank,
            micro_batches=micro_batches,
            padded_share=1 - step_lanes / (rows * micro_batches * gpus),
            stages=stages,
            checkpoint_bytes=FP32_BYTES
            * (model.num_parameters + model.num_states + lanes * self._lane_elements),
            step_seconds=seconds,
            tokens_per_second=step_lanes * config.data.tgt_len / seconds,
            num_steps=steps,
            days=None if steps is None else steps * seconds / DAY_SECONDS,
        )

    def _peak(self, gpus: int, stage: int, rows: int, micro_batches: int) -> RankBytes:
        device = self._assumptions.device
        if rows not in self._models:  # A dry run takes seconds.
            self._models[rows] = dry_run(self._config, micro_batch_rows=rows, device=device)
        return RankPeak(
            model=self._models[rows],
            zero=ZeroSettings.of(
                self._config.deepspeed, num_ranks=gpus, on_gpu=device == "cuda", stage=stage
            ),
            num_ranks=gpus,
            num_micro_batches=micro_batches,
            lane_bytes=rows * micro_batches * self._config.data.num_turns * self._lane_bytes,
            num_turns=self._config.data.num_turns,
            copies_to_reduce=device == "cpu",
        ).peak()


# --- the text -------------------------------------------------------------------------------------

LABEL_WIDTH, COLUMN_WIDTH = 42, 13
_ROWS: list[tuple[str, Callable[[ScaleEstimate], str]]] = [
    ("lanes per rank", lambda scale: str(scale.lanes_per_rank)),
    ("micro-batches per step", lambda scale: str(scale.micro_batches)),
    ("rows that are padding", lambda scale: f"{scale.padded_share:.1%}"),
    ("time of a step", lambda scale: _duration(scale.step_seconds)),
    ("tokens per second, all ranks", lambda scale: f"{scale.tokens_per_second:,.0f}"),
    ("time of the run", lambda scale: _days(scale.days)),
    ("checkpoint", lambda scale: _size(scale.checkpoint_bytes)),
]


def lines_of(
    estimate: RunEstimate, assumptions: Assumptions, *, precision: Precision
) -> Iterator[str]:
    """The lines that `txl estimate` prints: tables with one column per number of GPUs."""
    yield (
        f"{estimate.num_parameters:,} parameters, {estimate.flops_per_token:.3g} FLOPs per token "
        f"(forward and backward), ZeRO stage {estimate.zero_stage}"
    )
    yield _world_sizes(estimate.max_ranks, assumptions)
    yield ""
    is_gpu = assumptions.device == "cuda"
    yield _row("GPUs" if is_gpu else "ranks", [f"{scale.gpus:,}" for scale in estimate.scales])
    for label, cell in _ROWS:
        yield _row(label, [cell(scale) for scale in estimate.scales])
    yield ""
    yield "peak memory of a rank's device"
    for stage in sorted({stage for scale in estimate.scales for stage in scale.stages}):
        mark = " (the run's)" if stage == estimate.zero_stage else ""
        cells = [_size(scale.stages[stage].device) for scale in estimate.scales]
        yield _row(f"  ZeRO stage {stage}{mark}", cells)
    yield ""
    yield f"parts of that peak at stage {estimate.zero_stage}, and what is on the host"
    for part in ("weights", "gradients", "optimizer", "buffers", "lanes", "activations", "host"):
        uses = (scale.stages[estimate.zero_stage] for scale in estimate.scales)
        yield _row(f"  {part}", [_size(getattr(use, part)) for use in uses])
    yield ""
    flops, share = assumptions.peak(precision), f"{assumptions.utilisation:.0%} utilisation"
    if is_gpu or assumptions.peak_tflops:
        yield f"assumed: {flops:g} TFLOP/s per {'GPU' if is_gpu else 'rank'} at {share}"
    else:
        yield f"measured on this CPU: {flops:.3g} TFLOP/s; assumed: as much per rank, at {share}"
    if is_gpu:
        yield "allow 1 to 2 GiB more per GPU for the CUDA context, NCCL and fragmentation"


def _world_sizes(lanes: int | None, assumptions: Assumptions) -> str:
    if lanes is None:
        return f"legal world sizes: any; {assumptions.lanes_per_gpu} lanes per GPU"
    even = [ranks for ranks in range(1, lanes + 1) if lanes % ranks == 0]
    shown = ", ".join(map(str, even if len(even) <= 16 else [*even[:12], "...", *even[-3:]]))
    return f"legal world sizes: 1 to {lanes:,} (lanes of a step); without padding: {shown}"


def _row(label: str, cells: list[str]) -> str:
    return f"{label:<{LABEL_WIDTH}}" + "".join(f"{cell:>{COLUMN_WIDTH}}" for cell in cells)


def _size(num_bytes: float) -> str:
    for exponent, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**exponent:
            return f"{num_bytes / 1024**exponent:,.2f} {unit}"
    return f"{num_bytes:.0f}"


def _duration(seconds: float) -> str:
    for limit, unit, factor in ((1, "ms", 1e3), (120, "s", 1), (7200, "min", 1 / 60)):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    hours = seconds / 3600
    return f"{hours:.3g} h" if hours < 48 else f"{hours / 24:.3g} d"


def _days(days: float | None) -> str:
    return "unknown" if days is None else _duration(DAY_SECONDS * days)
