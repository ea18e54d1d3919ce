"""The estimate of one run on a number of GPUs, and the text that `txl estimate` prints.

Bytes are those of a dry run and of DeepSpeed's buffers (`rank_bytes.py`). Time is that of the
matrix products at an assumed share of the peak, which is measured on a CPU; communication, failures
and saves are not in it (docs/scaling.md).
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data_pipeline.errors import clock
from data_pipeline.shards.manifest import MANIFEST_NAME
from data_pipeline.system.remote_path import dataset_path
from txl_dist.config.run_config import Precision, RunConfig
from txl_dist.errors import ConfigError
from txl_dist.estimate.dry_run import Device, dry_run, tail_rows
from txl_dist.estimate.rank_bytes import FP32_BYTES, RankBytes, RankPeak, ZeroSettings
from txl_dist.model.flops import training_flops
from txl_dist.model.memory import memory_kind
from txl_dist.runtime.device import TORCH_DTYPE, device_peak_flops
from txl_dist.training.data import open_corpora

STAGES = (0, 1, 2, 3)
A100_TFLOPS = {"bf16": 312.0, "fp32": 19.5}
"""By `precision`, from the data sheet of NVIDIA's A100 (dense bf16; fp32 without TF32)."""
UTILISATION = 0.3
"""Share of the peak that a step reaches (MFU), if nothing else is given."""


def peak_of(device: Device, precision: Precision) -> float:
    """TFLOP/s of one rank: of an A100, or of this machine's CPU, measured."""
    if device == "cuda":
        return A100_TFLOPS[precision]
    return device_peak_flops(torch.device("cpu"), TORCH_DTYPE[precision]) / 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEstimate:
    """A run on a number of GPUs, or of ranks on CPUs."""

    device: Device
    peak_tflops: float
    """Of one rank; assumed, as the utilisation is."""
    utilisation: float
    num_parameters: int
    flops_per_token: float
    """Forward and backward, with a full memory; frozen weights count as if they were trained."""
    zero_stage: int
    gpus: int
    lanes_per_step: int
    """The largest number of ranks."""
    micro_batches: int
    padded_share: float
    """Share of the computed rows that are padding, because the lanes do not divide evenly."""
    stages: dict[int, RankBytes]
    """By ZeRO stage; without the stages that the optimizer does not support."""
    checkpoint_bytes: int
    step_seconds: float
    tokens_per_second: float
    """Summed over all ranks."""
    num_steps: int

    @property
    def days(self) -> float:
        return self.num_steps * self.step_seconds / 86400

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "stages": {
                stage: {**asdict(use), "device": use.device} for stage, use in self.stages.items()
            },
            "days": self.days,
            "legal_world_sizes": {"minimum": 1, "maximum": self.lanes_per_step},
        }


def with_data(config: RunConfig) -> RunConfig:
    """The config with the vocabulary of its data.

    The manifests of the datasets are read, if they are there. Raises ConfigError if the vocabulary
    is unknown, DataError for a damaged dataset.
    """
    vocab_size, data = config.model.vocab_size, config.data
    paths = [dataset_path(corpus.path) for corpus in data.corpora.values()]
    if all(not isinstance(path, Path) or (path / MANIFEST_NAME).exists() for path in paths):
        vocab_size = open_corpora(data)[0].manifest.vocab_size
    elif not vocab_size:
        listed = ", ".join(corpus.path for corpus in data.corpora.values())
        raise ConfigError(
            f"model.vocab_size=0 means that of the data, but {listed} has no manifest. Add "
            "model.vocab_size=N, or prepare the data first (txl prepare)"
        )
    try:
        model = replace(config.model, vocab_size=vocab_size)
    except ValueError as error:
        raise ConfigError(f"model, with {vocab_size:,} token ids: {error}") from None
    return config.model_copy(update={"model": model})


def flops_per_token(config: RunConfig, *, rows: int | None = None) -> float:
    """FLOPs of forward and backward, with a full memory, of a micro-batch of `rows`; None: of all.

    The distances of a micro-batch are projected once for all its rows.
    """
    rows, tgt_len = rows or config.data.rows, config.data.tgt_len
    flops = training_flops(
        config.model,
        num_lanes=rows,
        tgt_len=tgt_len,
        tail_rows=tail_rows(config.model, num_tokens=rows * tgt_len),
        num_segments=config.training.backprop_segments,
    )
    return flops / (rows * tgt_len)


def estimate_run(
    config: RunConfig,
    *,
    gpus: int,
    peak_tflops: float,
    utilisation: float = UTILISATION,
    device: Device = "cuda",
) -> RunEstimate:
    """Estimate `config`, whose vocabulary is set.

    Raises ConfigError for more GPUs than lanes, and for `deepspeed.offload`, which is not counted.
    """
    data = config.data
    if config.deepspeed.offload != "none":
        raise ConfigError(
            f"deepspeed.offload={config.deepspeed.offload} is not in the estimate. Add "
            "deepspeed.offload=none: the part `optimizer` is what moves to the host"
        )
    if gpus > data.rows:
        raise ConfigError(
            f"{gpus} GPUs for {data.rows_setting}={data.rows}: every rank needs a lane, so this "
            f"config runs on 1 to {data.rows} GPUs. To estimate a larger batch, add "
            f"{data.rows_setting}={gpus}"
        )
    rank_rows = math.ceil(data.rows / gpus)
    rows = min(rank_rows, config.training.micro_batch_lanes or rank_rows)
    micro_batches = math.ceil(rank_rows / rows)
    model = dry_run(config, micro_batch_rows=rows, device=device)
    memory_dtype, on_gpu = TORCH_DTYPE[config.training.memory_dtype], device == "cuda"
    lane = memory_kind(config.model).empty(1, dtype=memory_dtype, device="meta").row(0).values()
    lane_bytes = sum(tensor.nbytes for tensor in lane)
    stages = {
        stage: RankPeak(
            model=model,
            zero=ZeroSettings.of(config.deepspeed, num_ranks=gpus, on_gpu=on_gpu, stage=stage),
            num_ranks=gpus,
            num_micro_batches=micro_batches,
            lane_bytes=rows * micro_batches * data.num_turns * lane_bytes,
            num_turns=data.num_turns,
            copies_to_reduce=not on_gpu,
        ).peak()
        for stage in STAGES
        if not any(is_wrong for is_wrong, _ in config.optimizer.checks_at_stage(stage))
    }
    # Recomputing is a second forward, a third of forward and backward.
    recompute = 4 / 3 if config.training.activation_checkpointing else 1.0
    computed = rows * micro_batches * data.tgt_len * flops_per_token(config, rows=rows)
    seconds = computed * recompute
    seconds /= peak_tflops * 1e12 * utilisation
    return RunEstimate(
        device=device,
        peak_tflops=peak_tflops,
        utilisation=utilisation,
        num_parameters=model.num_parameters,
        flops_per_token=flops_per_token(config),
        zero_stage=config.deepspeed.zero_stage,
        gpus=gpus,
        lanes_per_step=data.rows,
        micro_batches=micro_batches,
        padded_share=1 - data.rows / (rows * micro_batches * gpus),
        stages=stages,
        checkpoint_bytes=FP32_BYTES
        * (
            model.num_parameters
            + model.num_states
            + data.num_lanes * sum(tensor.numel() for tensor in lane)
        ),
        step_seconds=seconds,
        tokens_per_second=data.tokens_per_step / seconds,
        num_steps=config.num_steps,
    )


# --- the text -------------------------------------------------------------------------------------


def lines_of(estimate: RunEstimate) -> Iterator[str]:
    lanes, run_stage = estimate.lanes_per_step, estimate.zero_stage
    yield (
        f"{estimate.num_parameters:,} parameters, {estimate.flops_per_token:.3g} FLOPs per token "
        f"(forward and backward), ZeRO stage {run_stage}"
    )
    yield f"legal world sizes: 1 to {lanes:,} (lanes of a step)"
    yield ""
    yield from _rows(
        {
            "GPUs": f"{estimate.gpus:,}",
            "micro-batches per step": str(estimate.micro_batches),
            "rows that are padding": f"{estimate.padded_share:.1%}",
            "time of a step": f"{estimate.step_seconds * 1e3:,.2f} ms",
            "tokens per second, all ranks": f"{estimate.tokens_per_second:,.0f}",
            "time of the run": (
                f"{days:,.1f} days" if (days := estimate.days) >= 1 else clock(days * 86400)
            ),
            "checkpoint": _size(estimate.checkpoint_bytes),
        }
    )
    yield ""
    yield "peak memory of a rank's device"
    yield from _rows(
        {
            f"  ZeRO stage {stage}{' (the run)' * (stage == run_stage)}": _size(use.device)
            for stage, use in estimate.stages.items()
        }
    )
    yield ""
    yield f"parts of that peak at stage {run_stage}"
    sizes = asdict(estimate.stages[run_stage])
    yield from _rows({f"  {part}": _size(num_bytes) for part, num_bytes in sizes.items()})
    yield ""
    on_cpu = estimate.device == "cpu"
    yield (
        f"assumed: {estimate.peak_tflops:.3g} TFLOP/s per {'rank' if on_cpu else 'GPU'}, at a "
        f"utilisation of {estimate.utilisation:.0%}"
    )
    if not on_cpu:
        yield "allow 1 to 2 GiB more per GPU for the CUDA context, NCCL and fragmentation"


def _rows(cells: dict[str, str]) -> Iterator[str]:
    for label, cell in cells.items():
        yield f"{label:<42}{cell:>13}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.3f} GiB"
