"""Seconds from the kill of a rank to the next training step, with plain processes and with Ray.

    python benchmarks/restart_time.py [--on processes ray] [--repeats 3]

A run of two ranks trains a tiny model, so the time is that of the system: the launcher notices the
death and ends the other rank, new processes import their modules and meet, and the checkpoint is
verified and loaded. One rank is killed by SIGKILL while it trains. The table has the median of the
repetitions, and its parts. Exits with 1 if a total exceeds its limit, which is meant for a machine
that has a free core for each rank.
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import psutil

CONFIG = Path(__file__).parents[1] / "configs" / "tiny.yaml"
LIMIT_SECONDS = {"processes": 10.0, "ray": 15.0}
RANK_PROCESS = {"processes": "txl_dist.launch.rank_process", "ray": "ray::RankActor"}
"""A word of the command line of a rank."""
NUM_RANKS = 2
STEPS_BEFORE_KILL = 20
MARKS = (
    ("detected, other ranks ended", re.compile(r"; (with its node.*)?restart\b")),
    ("started and resumed", re.compile(r"resuming at step \d+ from")),
    ("first step", re.compile(r" step \d+ \| loss ")),
)
"""The parts of a restart, each with the line of the launcher that ends it."""


def main() -> None:
    """Measure, print the table, and compare it with the limits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on", nargs="+", choices=LIMIT_SECONDS, default=list(LIMIT_SECONDS))
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    too_slow = False
    print(f"{'launcher':<11}{'part':<32}{'seconds':>8}{'limit':>7}")
    with tempfile.TemporaryDirectory(prefix="txl-restart-") as directory:
        data = prepare(Path(directory))
        for on in arguments.on:
            rows = [
                restart_seconds(on, data, Path(directory) / f"{on}-{repeat}")
                for repeat in range(arguments.repeats)
            ]
            for index, (part, _) in enumerate(MARKS):
                print(f"{on:<11}{part:<32}{statistics.median(row[index] for row in rows):8.1f}")
            total, limit = statistics.median(map(sum, rows)), LIMIT_SECONDS[on]
            too_slow |= total > limit
            print(f"{on:<11}{'kill to next step':<32}{total:8.1f}{limit:7.0f}", flush=True)
    sys.exit(too_slow)


def prepare(directory: Path) -> Path:
    """A small dataset: a module of the standard library."""
    text = Path(sysconfig.get_paths()["stdlib"]) / "argparse.py"
    data = directory / "data"
    subprocess.run(
        [*txl(), "prepare", str(text), "--out", str(data), "--format", "text"],
        check=True,
        capture_output=True,
    )
    return data


def txl() -> list[str]:
    return [sys.executable, "-m", "txl_dist"]


def restart_seconds(on: str, data: Path, run: Path) -> list[float]:
    """Train, kill a rank after some steps, and time the parts of the restart."""
    settings = (f"data.path={data}", f"directory={run}", "evaluation.split=null",
                "training.num_steps=1000000", "training.checkpoint_interval_steps=10")  # fmt: skip
    launch = ("--on", on, "--ranks", str(NUM_RANKS), "--max-restarts", "1")
    process = subprocess.Popen(
        [*txl(), "train", str(CONFIG), *settings, *launch],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        for _ in range(STEPS_BEFORE_KILL):
            wait_for_line(process, MARKS[-1][1])
        kill_rank(process.pid, RANK_PROCESS[on])
        marks = [time.monotonic()]
        for _, pattern in MARKS:
            wait_for_line(process, pattern)
            marks.append(time.monotonic())
    finally:
        process.terminate()
        process.communicate()
    return [end - start for start, end in pairwise(marks)]


def wait_for_line(process: subprocess.Popen[str], pattern: re.Pattern[str]) -> None:
    """Read the output of a process up to the first line that matches."""
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        output.append(line)
        if pattern.search(line):
            return
    sys.exit(f"the run ended early:\n{''.join(output)}")


def kill_rank(launcher_pid: int, word: str) -> None:
    descendants = psutil.Process(launcher_pid).children(recursive=True)
    ranks = [child for child in descendants if word in " ".join(child.cmdline())]
    os.kill(ranks[-1].pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
