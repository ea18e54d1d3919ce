"""Time to the first step, against bare libraries, and from the last step on.

    python benchmarks/start_time.py [--rounds 3]

    processes   txl train --on processes    torchrun, one step of DeepSpeed
    ray         txl train --on ray          Ray Train, one step of DeepSpeed; and actors, without it

Both sides run a small model with the same number of ranks, and take turns: a start depends on the
load of the machine and on what its caches hold. Measured is the time from the command to the line
of the first step, as a user sees it. The parts of the start of processes are the times of fault
points, which the ranks write to a trace. Usage errors count in CPU seconds.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from fault_traces import read_trace
from figures import Figure, run_script
from training_figures import bench_config, prepare_text

from txl_dist.config.config_file import dump_run_config
from txl_dist.config.training_config import TrackingConfig
from txl_dist.errors import TxlError
from txl_dist.runtime.fault_injection import TRACE_VARIABLE

BARE_STEP, BARE_RAY_START = (
    str(Path(__file__).with_name(name)) for name in ("bare_step.py", "bare_ray_start.py")
)
NUM_RANKS = 2
STEP_TEXT = "step 1 | loss"
TIMEOUT_SECONDS = 300.0
PARTS = (
    "launcher: checks of config and data; ranks: imports",
    "ranks: data, rendezvous, choice of the checkpoint",
    "ranks: model, engine, first segment",
)
TXL = (sys.executable, "-m", "txl_dist")
USAGE_ERRORS = (
    ("train", "CONFIG", "training.num_stepz=3"),
    ("train", "CONFIG", "data.path=missing"),
    ("train", "CONFIG", "--ranks", "many"),
    ("eval", "missing", "missing"),
    ("generate", "missing"),
    ("prepare", "missing", "--out", "out"),
    ("data", "inspect", "missing"),
)
"""Commands that must fail before torch and other slow libraries are imported."""
LIMITS = {"processes": 0.8, "ray": 0.7}
"""Limits, as fractions of the time of the bare libraries."""
USAGE_SECONDS, FIRST_LINE_SECONDS, SILENT_SECONDS, END_SECONDS = 0.6, 2.0, 5.0, 3.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """When a command printed its lines, in seconds."""

    began: float
    """On the monotonic clock; the others are differences."""
    first_line: float
    silence: float
    """Longest time without a line, until the first step."""
    first_step: float
    end: float
    """From the line of the first step, which is the last, to the end of the command."""


def bench_start(*, rounds: int) -> Iterator[Figure]:
    """Yield the figures: medians over the rounds."""
    with tempfile.TemporaryDirectory(prefix="txl-bench-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        prepare_text(work / "data")
        yield _usage_errors(work, rounds)
        yield from _processes(work, rounds)
        yield from _ray(work, rounds)


def _processes(work: Path, rounds: int) -> Iterator[Figure]:
    launch = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(NUM_RANKS))
    bare_command = [sys.executable, "-m", "torch.distributed.run", *launch, BARE_STEP]
    ours, bare, parts = [], [], []
    for number in range(rounds):
        trace = work / f"processes-{number}.trace"
        ours.append(_watch(_train_command(work, f"processes-{number}"), work, trace=trace))
        bare.append(_watch(bare_command, work))
        parts.append(_parts(ours[-1].began, trace))
    for name, seconds in zip(PARTS, zip(*parts, strict=True), strict=True):
        yield Figure(name, statistics.median(seconds), "s")
    yield from _comparison("processes", ours, {"torchrun": bare})


def _ray(work: Path, rounds: int) -> Iterator[Figure]:
    ours: list[Timeline] = []
    bare: dict[str, list[Timeline]] = {"train": [], "actors": []}
    for number in range(rounds):
        ours.append(_watch(_train_command(work, f"ray-{number}"), work))
        for kind, timelines in bare.items():
            command = [sys.executable, BARE_RAY_START, BARE_STEP, "2", kind]
            timelines.append(_watch(command, work))
    yield from _comparison("ray", ours, {"Ray Train": bare["train"], "Ray actors": bare["actors"]})


def _comparison(
    on: str, ours: Sequence[Timeline], bare: dict[str, list[Timeline]]
) -> Iterator[Figure]:
    """The first bare start is the one to compare with."""
    name = f"--on {on}"
    seconds = statistics.median(each.first_step for each in ours)
    yield Figure(f"{name}: to the first step, {NUM_RANKS} ranks", seconds, "s")
    for number, (library, timelines) in enumerate(bare.items()):
        bare_seconds = statistics.median(each.first_step for each in timelines)
        yield Figure(
            f"{name}: against bare {library}",
            seconds / bare_seconds,
            "of its time",
            None if number else LIMITS[on],
            at_most=True,
            note=f"{bare_seconds:.1f} s",
        )
    for label, values, limit in (
        ("first line", [each.first_line for each in ours], FIRST_LINE_SECONDS),
        ("longest silence", [each.silence for each in ours], SILENT_SECONDS),
        ("from the last step to the end", [each.end for each in ours], END_SECONDS),
    ):
        yield Figure(f"{name}: {label}", statistics.median(values), "s", limit, at_most=True)


def _train_command(work: Path, name: str) -> list[str]:
    """`txl train` of one step, with tracking in a new database."""
    config = bench_config(
        work / "data",
        work / name / "run",
        num_ranks=NUM_RANKS,
        num_steps=1,
        tracking=TrackingConfig(enabled=True),
    )
    path = work / f"{name}.yaml"
    path.write_text(dump_run_config(config))
    on = name.partition("-")[0]
    return [*TXL, "train", str(path), "--on", on, "--ranks", str(NUM_RANKS)]


def _watch(command: Sequence[str], work: Path, *, trace: Path | None = None) -> Timeline:
    """Run a command to its end. Raises TxlError if it fails, or never prints its first step."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"} | (
        {TRACE_VARIABLE: str(trace)} if trace else {}
    )
    began = time.monotonic()
    times, first_step, lines = [began], None, []
    with subprocess.Popen(
        command,
        cwd=work,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if first_step is None:
                times.append(time.monotonic())
                first_step = times[-1] if STEP_TEXT in line else None
        code = process.wait(TIMEOUT_SECONDS)
    ended = time.monotonic()
    if code or first_step is None:
        raise TxlError(f"{' '.join(command)} ended with code {code}:\n{''.join(lines[-20:])}")
    return Timeline(
        began=began,
        first_line=times[1] - began,
        silence=max(later - earlier for earlier, later in pairwise(times)),
        first_step=first_step - began,
        end=ended - first_step,
    )


def _parts(began: float, trace: Path) -> list[float]:
    """Seconds of each part of a start. A part ends when the slowest rank has ended it."""
    lines = read_trace(trace)
    reached = [
        max(line.time for line in lines if line.point == name)
        for name in ("start", "engine", "step")
    ]
    return [later - earlier for earlier, later in pairwise([began, *reached])]


def _usage_errors(work: Path, rounds: int) -> Figure:
    """CPU seconds of the slowest of some commands that must be refused."""
    config = _train_command(work, "processes-usage")[len(TXL) + 1]
    seconds = {}
    for words in USAGE_ERRORS:
        command = [*TXL, *(config if word == "CONFIG" else word for word in words)]
        runs = [_cpu_seconds(command, work) for _ in range(rounds)]
        seconds[" ".join(words)] = statistics.median(runs)
    slowest = max(seconds, key=lambda words: seconds[words])
    return Figure(
        f"the slowest of {len(seconds)} usage errors",
        seconds[slowest],
        "CPU s",
        USAGE_SECONDS,
        at_most=True,
        note=f"txl {slowest}",
    )


def _cpu_seconds(command: Sequence[str], work: Path) -> float:
    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    ended = subprocess.run(command, cwd=work, capture_output=True, check=False)
    if ended.returncode == 0:
        raise TxlError(f"{' '.join(command)} was accepted")
    return used() - before


if __name__ == "__main__":
    run_script(__doc__, bench_start, rounds=3)
