"""Step time and peak memory of each option for speed and memory, at the quickstart's size.

    python benchmarks/throughput_options.py [--steps 12] [--rounds 2] [k.e.y=value ...]

Every measurement is a training run of one rank in a new process. The options alternate, and a row
shows medians over the rounds: seconds per step and peak memory (VmHWM above the memory of the
process before the run is built), and both as ratios to the first row. Settings follow the options.
`training.compile` is not in the table: it compiles for a minute, see docs/experiments.md.
"""

import argparse
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import torch
from figures import kib
from one_rank import one_rank, prepare_email

from data_pipeline.streams.segments import Batch
from txl_dist.config.config_file import load_run_config

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
OPTIONS: dict[str, list[str]] = {
    "defaults": [],
    "activation checkpointing": ["training.activation_checkpointing=true"],
    "2 micro-batches": ["training.micro_batch_lanes=HALF"],
    "memory in bf16": ["training.memory_dtype=bf16"],
    "optimizer on the host": ["deepspeed.offload=optimizer"],
    "stage 2": ["deepspeed.zero_stage=2"],
    "stage 2, optimizer on the host": ["deepspeed.zero_stage=2", "deepspeed.offload=optimizer"],
    "stage 3": ["deepspeed.zero_stage=3"],
    "stage 3, optimizer on the host": ["deepspeed.zero_stage=3", "deepspeed.offload=optimizer"],
    "stage 3, parameters on the host": [
        "deepspeed.zero_stage=3",
        "deepspeed.offload=parameters",
    ],
    "profiler in every step": ["training.profile_steps=[1,1000000]"],
    "bf16": ["precision=bf16"],
    "bf16, activation checkpointing": ["precision=bf16", "training.activation_checkpointing=true"],
}
WARM_UP_STEPS = 3

Measurement = tuple[float, float]
"""Seconds per step, peak MiB."""


def main() -> None:
    """Measure all options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="settings of all runs: k.e.y=value")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    results: dict[str, list[Measurement]] = {name: [] for name in OPTIONS}
    with tempfile.TemporaryDirectory() as folder:
        data = prepare_email(Path(folder) / "data")
        for number in range(options.rounds):
            for name, settings in OPTIONS.items():
                run = Path(folder) / f"{name}-{number}"
                arguments = (data, run, options.steps)
                # VmHWM is a maximum over the life of a process, so every run needs a new one.
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                    overrides = [*options.overrides, *settings]
                    results[name].append(pool.submit(measure, *arguments, overrides).result())
    print_table(results)


def measure(data: Path, run: Path, num_steps: int, overrides: list[str]) -> Measurement:
    """Train in this process."""
    torch.set_num_threads(1)
    settings = [
        f"data.path={data}",
        f"directory={run}",
        f"training.num_steps={num_steps + WARM_UP_STEPS}",
        "optimizer.warmup_steps=1",
        "training.checkpoint_interval_steps=1000000",
        "training.log_interval_steps=1",
        "evaluation.split=null",
        "tracking.enabled=false",
    ]
    num_lanes = load_run_config(CONFIG, settings).data.num_lanes
    overrides = [value.replace("HALF", str(num_lanes // 2)) for value in overrides]
    before = kib("VmRSS")
    started: list[float] = []
    peaks: list[float] = []

    def observed() -> Batch:
        batch = read()
        started.append(time.perf_counter())
        peaks.append(kib("VmHWM"))  # before the checkpoint at the end of the run
        return batch

    with one_rank(CONFIG, [*settings, *overrides]) as trainer:
        read = trainer.batches.read
        trainer.batches.read = observed  # type: ignore[method-assign]
        trainer.run()
    seconds = [end - start for start, end in pairwise(started)][WARM_UP_STEPS:]
    return statistics.median(seconds), (peaks[-1] - before) / 1024


def print_table(results: dict[str, list[Measurement]]) -> None:
    """One row per option."""
    medians = {
        name: tuple(statistics.median(column) for column in zip(*rows, strict=True))
        for name, rows in results.items()
    }
    base_seconds, base_mib = medians["defaults"]
    print(f"{'option':34}{'ms per step':>12}{'ratio':>8}{'peak MiB':>10}{'ratio':>8}")
    for name, (seconds, mib) in medians.items():
        ratios = seconds / base_seconds, mib / base_mib
        print(f"{name:34}{seconds * 1e3:12.1f}{ratios[0]:8.2f}{mib:10.0f}{ratios[1]:8.2f}")


if __name__ == "__main__":
    main()
