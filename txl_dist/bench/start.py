"""`txl bench start`: the seconds from `txl train` to the first step, by part.

After a kill this is the time without progress, besides the steps since the last checkpoint. The
times of the parts are those of fault points, which the ranks write to a trace.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil

from txl_dist.bench.rounds import Figure
from txl_dist.bench.train import bench_config, prepare_text
from txl_dist.config.config_file import dump_run_config
from txl_dist.config.training_config import TrackingConfig
from txl_dist.errors import TxlError
from txl_dist.runtime.fault_injection import TRACE_VARIABLE, read_trace

NUM_RANKS = 2
TIMEOUT_SECONDS = 300.0
PARTS = (
    "launcher: imports, checks of config and data",
    "ranks: imports",
    "ranks: data, rendezvous, choice of the checkpoint",
    "ranks: model, engine, first segment",
)


def bench_start(*, rounds: int) -> Iterator[Figure]:
    """Yield the median seconds of each part over the rounds, and of the whole."""
    with tempfile.TemporaryDirectory(prefix="txl-bench-") as folder:
        work = Path(folder)
        prepare_text(work / "data")
        starts = [_start(work, work / f"run-{number}") for number in range(rounds)]
    for part, seconds in zip(PARTS, zip(*starts, strict=True), strict=True):
        yield Figure(part, statistics.median(seconds), "s")
    totals = [sum(start) for start in starts]
    note = f"{min(totals):.1f} to {max(totals):.1f} in {rounds} rounds"
    name = f"`txl train` to the first step, {NUM_RANKS} ranks, processes"
    yield Figure(name, statistics.median(totals), "s", 10.0, at_most=True, note=note)


def _start(work: Path, run: Path) -> list[float]:
    """Seconds of each part of one start."""
    tracking = TrackingConfig(enabled=False)
    config = bench_config(work / "data", run, num_ranks=NUM_RANKS, num_steps=1, tracking=tracking)
    file, trace = run.with_suffix(".yaml"), run.with_suffix(".trace")
    file.write_text(dump_run_config(config))
    words = ("train", file, "--on", "processes", "--ranks", NUM_RANKS, "--quiet")
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "txl_dist", *map(str, words)],
        env={**os.environ, TRACE_VARIABLE: str(trace)},
    ) as process:
        launcher = psutil.Process(process.pid)
        while process.poll() is None and len(launcher.children()) < NUM_RANKS:
            time.sleep(0.005)
        spawned = time.monotonic()
        code = process.wait(TIMEOUT_SECONDS)
    if code:
        raise TxlError(f"`txl train {file}` ended with code {code}; its messages are above")
    # The first step begins when the last rank is ready.
    reached = {name: max(line.time for line in read_trace(trace) if line.point == name)
               for name in ("start", "engine", "step")}  # fmt: skip
    times = [began, spawned, reached["start"], reached["engine"], reached["step"]]
    return [later - earlier for earlier, later in pairwise(times)]
