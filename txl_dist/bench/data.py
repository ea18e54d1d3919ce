"""`txl bench data`: preparation, reading, resume, planning and data wait, each with its limit."""

import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from txl_dist.bench.data_plan import measure_plan
from txl_dist.bench.data_preparation import (
    damage_figure,
    gather_text,
    rate_figures,
    size_figures,
)
from txl_dist.bench.data_reading import measure_reading, measure_seek
from txl_dist.bench.rounds import Figure
from txl_dist.config.data_config import DataConfig
from txl_dist.config.run_config import RunConfig
from txl_dist.config.training_config import EvaluationConfig, TrackingConfig, TrainingConfig
from txl_dist.launch.processes import ProcessLauncher
from txl_dist.model.config import ModelConfig
from txl_dist.training.job import TrainJob


def bench_data(*, megabytes: float) -> Iterator[Figure]:
    """Yield each figure as soon as it is measured. All files go to a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="txl-bench-") as folder:
        work = Path(folder)
        text = gather_text(work, megabytes=megabytes)
        yield from rate_figures(text, work)
        yield from size_figures(text, work)
        yield damage_figure(text, work)
        yield from _reading_figures(work / "prepared")
        yield from _plan_figures()
        yield _wait_figure(work)


def _reading_figures(dataset: Path) -> Iterator[Figure]:
    rates = measure_reading(dataset)
    mtok, plain = rates.dataset / 1e6, rates.memmap / 1e6
    note = f"a plain memmap: {plain:.0f}, in one slice: {rates.memmap_strided / 1e6:.0f}"
    yield Figure("loading lanes with ages", mtok, "Mtok per CPU-s", 100.0, note=note)
    yield Figure("the same, of the plain memmap's rate", mtok / plain, "", 0.5)
    for lanes in (4, 8):
        median, best = measure_seek(dataset, num_lanes=lanes)
        note = f"best {best * 1e3:.1f}"
        name = f"resume to the first batch, {lanes} lanes"
        yield Figure(name, median * 1e3, "ms", 10.0, at_most=True, note=note)


def _plan_figures() -> Iterator[Figure]:
    seconds, megabytes = measure_plan()
    name = "plan of 10^12 tokens, 4,096 lanes, 512 ranks"
    yield Figure(name, seconds, "CPU-s", note=f"{megabytes:.0f} MB")


def _wait_figure(work: Path) -> Figure:
    """The share of a training step spent waiting for data, from the run's `metrics.jsonl`."""
    run = work / "run"
    config = RunConfig(
        directory=str(run),
        data=DataConfig(path=str(work / "prepared"), num_lanes=4, tgt_len=128),
        model=ModelConfig(n_layer=2, d_model=128, n_head=4, d_head=32, d_inner=256, mem_len=128),
        training=TrainingConfig(num_steps=30, log_interval_steps=5),
        evaluation=EvaluationConfig(split=None),
        tracking=TrackingConfig(enabled=False),
    )
    # One rank, started as `txl train` starts it.
    job = TrainJob(config=config, resume="never")
    ProcessLauncher().train(job, num_ranks=1, on_line=lambda _: None)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    waits = [line["data_wait"] for line in lines if "data_wait" in line]
    share = statistics.median(waits) * 100
    return Figure("data wait in training, small model", share, "% of a step", 1.0, at_most=True)
