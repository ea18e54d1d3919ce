"""Seconds to recovery, lost steps and goodput when the link between two hosts fails.

    python -m benchmarks.two_hosts [--only bad-link cut-5 ...] [--steps 1000]

The hosts are network namespaces on this machine with one rank each, so root is needed. A host is
cut off in the middle of a run of a tiny model, so the times are those of the system, not of the
model. Every run must have the losses of a run without a fault.

    recovery    from the moment when the link works again to the next training step
    lost        steps that were trained again
    goodput     the seconds of all steps in the run without a fault, divided by the wall seconds of
                this run from its start to its end. (The goodput in metrics.jsonl counts a wait
                inside a step as part of that step, so it is higher if a run waited through a cut.)

The runs are short, so even without a fault half of the time is start-up. Compare the rows.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.chaos_training import prepare_text
from tests.support.commands import num_lines, start_txl, wait_until
from tests.support.hosts import Host, Link, outputs_of, settings, torchrun_on, two_hosts
from tests.support.nodes import ray_node, token_environment
from tests.support.training_runs import TINY, losses, metrics

TIMEOUT_SECONDS = 300.0
LONG_CUT_SECONDS = 60.0
SHORT_LIMIT = "training.rank_timeout_seconds=15"
LONG_LIMIT = "training.rank_timeout_seconds=300"


@dataclass(frozen=True)
class Run:
    """One run of the benchmark."""

    data: Path
    directory: Path
    num_steps: int

    def words(self, *overrides: str) -> tuple[str, ...]:
        length = f"training.num_steps={self.num_steps}"
        return settings(self.data, self.directory, length, *overrides)

    def wait_for_middle(self) -> None:
        path = self.directory / "metrics.jsonl"
        wait_until(lambda: num_lines(path) > self.num_steps // 3, timeout_seconds=TIMEOUT_SECONDS)

    def wait_for_step(self) -> float:
        """Seconds from now to the next training step."""
        began = time.time()  # compared with the times of the lines
        wait_until(lambda: self._time_of_last_line() > began, timeout_seconds=TIMEOUT_SECONDS)
        return time.time() - began

    def _time_of_last_line(self) -> float:
        line, _ = (self.directory / "metrics.jsonl").read_bytes().rsplit(b"\n", 2)[-2:]
        return float(json.loads(line)["time"])


def undisturbed(run: Run) -> None:
    with two_hosts() as hosts:
        train(hosts, run.words())


def bad_link(run: Run) -> None:
    """5 ms in each direction, 1 % loss, 20 Mbit/s."""
    with two_hosts(link=Link(delay_seconds=0.005, loss=0.01)) as hosts:
        for host in hosts:
            host.limit_rate(bits_per_second=20_000_000)
        train(hosts, run.words())


def sat_out(run: Run, *, cut_seconds: float) -> float:
    """The time limit of a collective is longer than the cut."""
    with two_hosts() as hosts, torchrun_on(hosts, *run.words(LONG_LIMIT)) as agents:
        run.wait_for_middle()
        with hosts[1].cut_off():
            time.sleep(cut_seconds)
        recovery_seconds = run.wait_for_step()
        finish(agents)
    return recovery_seconds


def restarted(run: Run) -> float:
    """The ranks end by the limit of 15 s; after the cut the same command is started again."""
    with two_hosts() as hosts:
        with torchrun_on(hosts, *run.words(SHORT_LIMIT)) as agents:
            run.wait_for_middle()
            with hosts[1].cut_off():
                began = time.monotonic()
                outputs_of(agents, timeout_seconds=TIMEOUT_SECONDS)
                time.sleep(LONG_CUT_SECONDS - (time.monotonic() - began))
        with torchrun_on(hosts, *run.words(SHORT_LIMIT)) as agents:
            recovery_seconds = run.wait_for_step()
            finish(agents)
    return recovery_seconds


def on_ray(run: Run) -> float:
    """Ray gives the host up; after the cut, Ray is started on it again."""
    os.environ |= {
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "2000",
        "RAY_health_check_failure_threshold": "3",
    }
    directory = run.directory.parent
    with (
        two_hosts() as (first, second),
        ray_node(directory, ip=first.address, inside=first.prefix) as head,
    ):
        with ray_node(directory, join=head.address, ip=second.address, inside=second.prefix):
            training = start_txl(
                *("train", TINY, *run.words(LONG_LIMIT), "--on", head.address, "--ranks", 2),
                environment=token_environment(directory),
                inside=first.prefix,
            )
            run.wait_for_middle()
            with second.cut_off():
                time.sleep(LONG_CUT_SECONDS)
        began = time.monotonic()
        with ray_node(directory, join=head.address, ip=second.address, inside=second.prefix):
            started_seconds = time.monotonic() - began
            recovery_seconds = started_seconds + run.wait_for_step()
            finish([training])
    return recovery_seconds


SCENARIOS: dict[str, Callable[[Run], float | None]] = {
    "undisturbed": undisturbed,
    "bad-link": bad_link,
    "cut-5": lambda run: sat_out(run, cut_seconds=5.0),
    "cut-60": lambda run: sat_out(run, cut_seconds=LONG_CUT_SECONDS),
    "cut-60-restarted": restarted,
    "cut-60-on-ray": on_ray,
}


def train(hosts: tuple[Host, Host], words: tuple[str, ...]) -> None:
    with torchrun_on(hosts, *words) as agents:
        finish(agents)


def finish(processes: list[subprocess.Popen[str]]) -> None:
    outputs = outputs_of(processes, timeout_seconds=TIMEOUT_SECONDS)
    if any(process.returncode for process in processes):
        sys.exit("\n".join(["a run failed:", *outputs]))


def main() -> None:
    """Run the scenarios and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS)[1:])
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    names = ["undisturbed", *(arguments.only or list(SCENARIOS)[1:])]
    print(f"{'run':<18}{'step ms':>9}{'wall s':>8}{'recovery s':>12}{'lost':>6}{'goodput':>9}")
    with tempfile.TemporaryDirectory(prefix="txl-two-hosts-") as directory:
        data = prepare_text(Path(directory))
        straight, steps_seconds = Path(directory) / "undisturbed", 0.0
        for name in names:
            run = Run(data, Path(directory) / name, arguments.steps)
            began = time.monotonic()
            recovery_seconds = SCENARIOS[name](run)
            wall_seconds = time.monotonic() - began
            if losses(run.directory) != losses(straight):
                sys.exit(f"{name}: the losses differ from those without a fault")
            times = [line["time"] for line in metrics(run.directory)]
            step_seconds = statistics.median(after - before for before, after in pairwise(times))
            steps_seconds = steps_seconds or step_seconds * arguments.steps
            recovery = "-" if recovery_seconds is None else f"{recovery_seconds:.1f}"
            lost_steps = metrics(run.directory)[-1]["lost_steps"]
            print(
                f"{name:<18}{step_seconds * 1000:9.1f}{wall_seconds:8.1f}{recovery:>12}"
                f"{lost_steps:6}{steps_seconds / wall_seconds:9.1%}",
                flush=True,
            )


if __name__ == "__main__":
    try:
        main()
    except pytest.skip.Exception as reason:  # raised by the helpers of the tests
        sys.exit(str(reason))
