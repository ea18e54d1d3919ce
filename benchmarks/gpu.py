"""Training steps of the shipped models on one GPU: tokens/s, MFU and peak memory, as Markdown.

    python benchmarks/gpu.py [--models nvidia-base,wt103-base] [--compile without_graphs]
        [--seconds 600]

A step is a micro-batch as training computes it, without DeepSpeed: dropout by lane, forward under
autocast, backward, clipping and fused AdamW, with a full memory and targets whose frequencies fall
like those of words. Steps follow each other without a synchronisation; a round of steps ends with
one. The column "in training" has the same micro-batch as a step of `txl train` (training/step.py):
the engine and the optimizer of the config, and one read per step.

    MFU = FLOPs of the matrix products of a step (model/flops.py) / time / peak

against two peaks: that of the data sheet, and the fastest square product measured on the same
machine in the same dtype. If a model does not fit in memory, its number of lanes is halved.

The sizes are those of configs/paper, configs/nvidia and configs/modern, with the lanes that were
published for one GPU of several, and in rows NAME-LANES with as many as fit on one of 80 GB.
The table shows each MFU with its goal and the last recorded measurement; without a GPU, only these
two.

Sources: Dai et al. 2019, arXiv:1901.02860, and its code;
https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/LanguageModeling/Transformer-XL
"""

import argparse
import gc
import itertools
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from training_step import OLD, TrainingStep, zipf_segment

from data_pipeline.streams.segments import Batch
from txl_dist.config.config_file import load_run_config, named_configs
from txl_dist.config.run_config import Precision, RunConfig
from txl_dist.model.attention import choose_implementation
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import SECONDS_PER_SIZE, SIZES, TORCH_DTYPE, product_flops, synchronize
from txl_dist.runtime.world import World
from txl_dist.training.batches import DeviceBatch
from txl_dist.training.compilation import compile_model, record_layers
from txl_dist.training.engine import create_engine
from txl_dist.training.step import TrainStep

# Shapes: B lanes, T segment tokens, M memory tokens

STEPS_PER_ROUND = 4
WARM_UP_STEPS = 5
"""Kernels are compiled, and the allocator takes its GPU memory."""

HEADER = (
    "| model | attention | lanes x tokens | ms per step | in training | its speed, goal 0.93 "
    "| tokens/s | MFU, data sheet | goal | on 2026-11-26 | MFU, measured peak | peak GiB |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)
LAST_MEASURED = "2026-11-26"
"""On one H100; docs/experiments/gpus.md."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchModel:
    """One model and the shape of its micro-batch on one GPU."""

    config: ModelConfig
    tgt_len: int
    num_lanes: int
    mfu_goal: float | None = None
    """Goal of this project on one H100, against its data sheet."""
    last_mfu: float | None = None
    """That of LAST_MEASURED."""
    run: RunConfig | None = None
    """Engine and optimizer of the steps in training; None: these are not measured."""

    @property
    def memory_dtype(self) -> torch.dtype:
        """That of the config, also of the residual stream."""
        return TORCH_DTYPE[self.run.training.memory_dtype if self.run else "fp32"]


class PublishedModel(NamedTuple):
    """A config of the package, what its dataset would add, and its micro-batch on one GPU."""

    config: str
    vocab_size: int
    num_lanes: int
    mfu_goal: float
    last_mfu: float | None = None


MODELS = {
    "nvidia-base": PublishedModel("nvidia/wt103-base", 267_735, 32, 0.19, 0.126),
    "nvidia-base-256": PublishedModel("nvidia/wt103-base", 267_735, 256, 0.27),
    "wt103-base": PublishedModel("paper/wt103-base", 267_735, 60, 0.14, 0.080),
    "wt103-base-240": PublishedModel("paper/wt103-base", 267_735, 240, 0.20),
    "wt103-large": PublishedModel("paper/wt103-large", 267_735, 32, 0.34, 0.268),
    "wt103-large-96": PublishedModel("paper/wt103-large", 267_735, 96, 0.36),
    "enwik8-base": PublishedModel("paper/enwik8-base", 204, 22, 0.26, 0.177),
    "enwik8-base-88": PublishedModel("paper/enwik8-base", 204, 88, 0.30),
    "enwik8-large": PublishedModel("paper/enwik8-large", 204, 16, 0.36, 0.280),
    "enwik8-large-32": PublishedModel("paper/enwik8-large", 204, 32, 0.37),
    "modern-125m": PublishedModel("modern/125m", 32_768, 16, 0.37, 0.285),
    "modern-125m-64": PublishedModel("modern/125m", 32_768, 64, 0.40),
    "modern-350m": PublishedModel("modern/350m", 32_768, 16, 0.44, 0.361),
    "modern-350m-48": PublishedModel("modern/350m", 32_768, 48, 0.46),
}
"""By name, in the order of the table."""


def load_model(name: str) -> BenchModel:
    """One of MODELS."""
    published = MODELS[name]
    config = load_run_config(named_configs()[published.config])
    return BenchModel(
        config=replace(config.model, vocab_size=published.vocab_size),
        tgt_len=config.data.tgt_len,
        num_lanes=published.num_lanes,
        mfu_goal=published.mfu_goal,
        last_mfu=published.last_mfu,
        run=config,
    )


DATA_SHEET_TFLOPS = {
    # The most specific name first: the words of a device's name contain all words of one of these.
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "A100": 312.0,
    "A10G": 70.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
}
"""Dense bf16 products of one GPU, from NVIDIA's data sheets (without sparsity)."""


def data_sheet_flops(device_name: str) -> float | None:
    """Peak FLOP/s in bf16; None for a GPU that is not in the table, and for a part of one (MIG)."""
    words = set(device_name.replace("-", " ").split())
    if "MIG" in words:
        return None
    return next(
        (
            tflops * 1e12
            for name, tflops in DATA_SHEET_TFLOPS.items()
            if words.issuperset(name.split())
        ),
        None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRow:
    """One model with one implementation of attention."""

    model: str
    attention: str
    kernel: str
    """The function that `attention` selects for this model."""
    num_lanes: int
    tgt_len: int
    step_ms: float | None = None
    """Median over the rounds; None if it could not run, see `note`."""
    training_step_ms: float | None = None
    """The same for a step of `txl train`."""
    tokens_per_second: float | None = None
    mfu_data_sheet: float | None = None
    """None if the data sheet of the device is not known."""
    mfu_measured: float | None = None
    mfu_goal: float | None = None
    last_mfu: float | None = None
    peak_gib: float | None = None
    """Most GPU memory that tensors took."""
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How rows are measured."""

    device: torch.device
    precision: Precision = "bf16"
    rounds: int = 10
    compile: bool = False
    cuda_graphs: bool = False
    data_sheet_flops: float | None = None


def measured_peak(settings: Settings) -> float:
    """FLOP/s of the fastest square product in the dtype of the steps."""
    dtype = TORCH_DTYPE[settings.precision]
    return max(
        product_flops(size, dtype, settings.device, seconds=SECONDS_PER_SIZE)
        for size in SIZES[settings.device.type]
    )


def measured_row(
    name: str, model: BenchModel, attention: str, settings: Settings, peak_flops: float
) -> GpuRow:
    """Measure a model; halve the number of lanes until the step fits in GPU memory."""
    config = replace(model.config, attention=attention)
    kernel = choose_implementation(config, settings.device, with_dropout=config.dropatt > 0).name
    row = GpuRow(
        model=name, attention=attention, kernel=kernel, num_lanes=model.num_lanes,
        tgt_len=model.tgt_len, mfu_goal=model.mfu_goal, last_mfu=model.last_mfu,
    )  # fmt: skip
    while True:
        try:
            return _measured(row, model, settings, peak_flops)
        except torch.OutOfMemoryError:
            if row.num_lanes == 1:
                return replace(row, note="out of memory")
            row = replace(row, num_lanes=row.num_lanes // 2, note="fewer lanes: out of memory")
        except Exception as error:  # of torch, triton or a compiler: the other rows may still run
            reason = str(error).partition("\n")[0]
            return replace(row, note=f"cannot run: {type(error).__name__}: {reason}")


def _measured(row: GpuRow, model: BenchModel, settings: Settings, peak_flops: float) -> GpuRow:
    is_gpu = settings.device.type == "cuda"
    if is_gpu:
        gc.collect()  # compiled models are in reference cycles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(settings.device)
    step = TrainingStep(
        replace(model.config, attention=row.attention),
        num_lanes=row.num_lanes,
        tgt_len=row.tgt_len,
        device=settings.device,
        precision=settings.precision,
        compiled=settings.compile,
        cuda_graphs=settings.cuda_graphs,
        memory_dtype=model.memory_dtype,
    )
    seconds = _median_seconds(step, settings)
    peak_gib = torch.cuda.max_memory_allocated(settings.device) / 2**30 if is_gpu else None
    achieved = step.flops / seconds
    sheet = settings.data_sheet_flops
    del step
    gc.collect()
    training_step_ms = None
    if model.run is not None:
        training_step_ms = 1e3 * _median_seconds(_step_of_a_run(row, model, settings), settings)
    return replace(
        row,
        step_ms=1e3 * seconds,
        training_step_ms=training_step_ms,
        tokens_per_second=row.num_lanes * row.tgt_len / seconds,
        mfu_data_sheet=None if sheet is None else achieved / sheet,
        mfu_measured=achieved / peak_flops if peak_flops else None,
        peak_gib=peak_gib,
    )


def _step_of_a_run(row: GpuRow, model: BenchModel, settings: Settings) -> Callable[[], object]:
    """A step of `txl train` on the lanes of the row, on one rank."""
    assert model.run is not None
    config, world = replace(model.config, attention=row.attention), World(0, 1)
    if not dist.is_initialized():
        backend = "nccl" if settings.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    network = TransformerXL(config)
    if settings.compile:
        compile_model(network, settings.device)
    if settings.cuda_graphs:
        record_layers(network, settings.device)
    lanes = range(row.num_lanes)
    shape: Any = {"num_micro_batches": 1, "micro_batch_rows": row.num_lanes}
    run = model.run.model_copy(update={"precision": settings.precision})
    step = TrainStep(
        create_engine(network, run, world, **shape), world, lanes_in_turns=[lanes], seed=0,
        byte_counts_V=np.ones(config.num_ids), memory_dtype=model.memory_dtype, **shape,
    )  # fmt: skip
    segment_shape = row.num_lanes, row.tgt_len
    input_BT, target_BT = (x.numpy() for x in zipf_segment(config.num_ids, segment_shape))
    age_BT = np.full(segment_shape, OLD, dtype=np.int32)
    batch = DeviceBatch.of(
        Batch(
            input_BT, target_BT, age_BT, position=OLD, next_position=OLD, lanes=lanes,
            num_targets=target_BT.size, turn=0, next_turn=0,
        ),
        settings.device,
    )  # fmt: skip
    numbers = itertools.count(1)

    def train() -> object:
        computed = step.compute(batch, step=next(numbers))
        return step.update(computed, lr=1e-4, check=lambda *_: None)

    return train


def _median_seconds(step: Callable[[], object], settings: Settings) -> float:
    for _ in range(WARM_UP_STEPS):
        step()
    return statistics.median(_round_seconds(step, settings.device) for _ in range(settings.rounds))


def _round_seconds(step: Callable[[], object], device: torch.device) -> float:
    """Seconds per step of a round."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(STEPS_PER_ROUND):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / STEPS_PER_ROUND


def machine_line(device: torch.device, *, peak_flops: float, sheet_flops: float | None) -> str:
    """The device and the library versions, in one line."""
    sheet = "unknown" if sheet_flops is None else f"{sheet_flops / 1e12:.0f}"
    return (
        f"{device_name(device)}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python "
        f"{platform.python_version()}; peak {peak_flops / 1e12:.3g} TFLOP/s measured, {sheet} in "
        "the data sheet (bf16)"
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()


def table_row(row: GpuRow) -> str:
    speed = row.step_ms / row.training_step_ms if row.step_ms and row.training_step_ms else None
    same = row.attention == row.kernel
    attention = row.attention if same else f"{row.attention} ({row.kernel})"
    cells = [
        row.model,
        attention,
        f"{row.num_lanes} x {row.tgt_len}",
        _number(row.step_ms, ".1f"),
        _number(row.training_step_ms, ".1f"),
        _number(speed, ".2f"),
        _number(row.tokens_per_second, ",.0f"),
        _number(row.mfu_data_sheet, ".3f"),
        _number(row.mfu_goal, ".2f"),
        _number(row.last_mfu, ".3f"),
        _number(row.mfu_measured, ".3f"),
        _number(row.peak_gib, ".1f"),
    ]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main() -> None:
    """Read the command line, and print each row when it is measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=[*MODELS])
    parser.add_argument("--attention", type=lambda text: text.split(","), default=["auto"])
    parser.add_argument("--precision", choices=TORCH_DTYPE, default="bf16")
    parser.add_argument("--rounds", type=int, default=10, help="the medians of them count")
    parser.add_argument("--seconds", type=float, default=600, help="no row begins after them")
    parser.add_argument(
        "--compile", choices=("true", "without_graphs", "false"), default="true",
        help="the setting training.compile",
    )  # fmt: skip
    chosen = parser.parse_args()
    if unknown := set(chosen.models) - set(MODELS):
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if not torch.cuda.is_available():
        print("torch finds no GPU on this machine; `txl doctor` shows what is installed\n")
        print_last(chosen.models)
        return
    device = torch.device("cuda", torch.cuda.current_device())
    settings = Settings(
        device=device,
        precision=chosen.precision,
        rounds=chosen.rounds,
        compile=chosen.compile != "false",
        cuda_graphs=chosen.compile == "true",
        data_sheet_flops=(
            data_sheet_flops(torch.cuda.get_device_name(device))
            if chosen.precision == "bf16"
            else None
        ),
    )
    models = {name: load_model(name) for name in chosen.models}
    print_rows(models, chosen.attention, settings, seconds=chosen.seconds)


def print_last(names: Sequence[str]) -> None:
    """The goals, and what was measured last."""
    print("| model | lanes x tokens | MFU | goal |\n|---|---|---|---|")
    for name in names:
        model = load_model(name)
        last = _number(model.last_mfu, ".3f")
        mfu = (
            f"not measured since {LAST_MEASURED}: {last}" if model.last_mfu else "not measured yet"
        )
        print(f"| {name} | {model.num_lanes} x {model.tgt_len} | {mfu} | {model.mfu_goal:.2f} |")


def print_rows(
    models: Mapping[str, BenchModel],
    attention: Sequence[str],
    settings: Settings,
    *,
    seconds: float = math.inf,
) -> None:
    """Print the machine and the table; notes about single rows go to the error output.

    After `seconds` no other row begins.
    """
    end = time.monotonic() + seconds
    peak_flops = measured_peak(settings)
    machine = machine_line(
        settings.device, peak_flops=peak_flops, sheet_flops=settings.data_sheet_flops
    )
    print(f"{machine}\n\n{HEADER}", flush=True)
    for (name, model), implementation in itertools.product(models.items(), attention):
        if time.monotonic() > end:
            print(f"{name}, {implementation}: not begun within {seconds:.0f} s", file=sys.stderr)
            continue
        row = measured_row(name, model, implementation, settings, peak_flops)
        print(table_row(row), flush=True)
        if row.note:
            print(f"{row.model}, {row.attention}: {row.note}", file=sys.stderr)


if __name__ == "__main__":
    main()
