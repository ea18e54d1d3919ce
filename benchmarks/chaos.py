"""Kills processes of training runs at random moments; the results must be those of a quiet run.

    make chaos N=1000            or: python benchmarks/chaos.py --kills 1000 --out runs/chaos

One run of `configs/tiny.yaml` on two ranks is never killed. Then the same run is started in new
directories. While it trains, a random process (launcher, rank, MLflow sender) gets SIGKILL or
SIGTERM, and `txl train` is called again, until the run has had its kills and ends by itself. Every
run must have the reference's metrics and checkpoint bit for bit, and every point once in MLflow.
A call with the same --out continues where the last one ended.

Random times alone would rarely hit a save, which takes milliseconds. So most kills wait for the
next beginning of a random phase, which the ranks write to a trace (fault_injection.py), and follow
it after a random delay. The phase of a kill is the last one that its victim began before it.

--out gets kills.jsonl (one line per kill), result.json and chaos.png.
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from chaos_comparison import compare, draw

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.prepare_settings import PrepareSettings
from txl_dist.runtime.fault_injection import TRACE_VARIABLE, Reached, read_trace

CONFIG = Path(__file__).parents[1] / "configs" / "tiny.yaml"
MODULES = ("abc.py", "bisect.py", "colorsys.py", "copy.py", "heapq.py", "keyword.py", "this.py")
"""The text: modules of the standard library."""
SETTINGS = (
    "training.checkpoint_interval_steps=15",
    "evaluation.interval_steps=25",
    "evaluation.max_tokens=500",
    "model.dropout=0.1",
    "tracking={enabled: true, experiment: chaos}",
)
NUM_RANKS = 2
STEPS_PER_KILL = 40
KILLS_PER_RUN = 25
PHASES = (
    "start",
    "engine",
    "resume",
    "step",
    "evaluation",
    "save/files",
    "save/manifest",
    "save/latest",
)
AIMS = dict(zip(PHASES, (10, 8, 7, 20, 20, 20, 8, 7), strict=True))
"""Weights of the phases that kills wait for."""
VICTIMS = {"launcher": 30, "rank 0": 30, "rank 1": 30, "sender": 10}
SIGTERM_SHARE = 0.15
LONGEST_DELAY_SECONDS = {"start": 6.0, "engine": 1.0, "resume": 0.2}
"""From the beginning of a phase to the kill; for other phases 0.04."""
TIMEOUT_SECONDS = 600.0
"""Of every wait. Reaching it fails the benchmark."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """One line of kills.jsonl."""

    number: int
    run: int
    step: int
    """Last step in metrics.jsonl."""
    phase: str
    aim: str
    victim: str
    signal: str
    exit_code: int | None
    """Of `txl train`; None if it went on, because only the sender was killed."""
    start_seconds: float | None
    """From the call of `txl train` to its first step; None if it was killed before that."""


def main() -> None:
    """Run the kills, compare the runs, write the results. Exits with 1 if a run differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    out, num_kills = options.out, options.kills
    kills_per_run = min(KILLS_PER_RUN, num_kills)
    data = prepare_text(out)

    def training(name: str) -> "Training":
        return Training(out / name, data, num_steps=STEPS_PER_KILL * kills_per_run)

    reference = training("reference")
    if not (reference.path / "finished").exists():
        with reference.started() as process:
            require(process.wait(TIMEOUT_SECONDS) == 0, f"see {reference.log}")
        (reference.path / "finished").touch()
    journal = out / "kills.jsonl"
    kills = [Kill(**json.loads(line)) for line in lines_of(journal)]
    comparisons = []
    for number in itertools.count(1):
        run = training(f"run-{number:04d}")
        result = run.path.with_suffix(".json")
        if not result.exists():
            left = min(kills_per_run - sum(k.run == number for k in kills), num_kills - len(kills))
            with journal.open("a") as file:
                for kill in disturb(run, kills, number=number, num_kills=left, seed=options.seed):
                    kills.append(kill)
                    file.write(json.dumps(asdict(kill)) + "\n")
                    file.flush()
                    print(
                        f"kill {kill.number}: {kill.signal} to {kill.victim} in {kill.phase}, "
                        f"run {number}, step {kill.step}",
                        flush=True,
                    )
            result.write_text(json.dumps(compare(run.path, reference.path)))
        comparisons.append(json.loads(result.read_text()))
        print(f"run {number}: {comparisons[-1]}", flush=True)
        if sum(kill.run <= number for kill in kills) >= num_kills:
            break
    summary = summarise(kills, comparisons)
    (out / "result.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(reference.path, [out / f"run-{n:04d}" for n in range(1, number + 1)],
         [asdict(kill) for kill in kills], PHASES, out / "chaos.png")  # fmt: skip
    print_summary(summary)
    sys.exit(0 if summary["equal"] else 1)


def prepare_text(out: Path) -> Path:
    """A small dataset with `train` and `valid`."""
    text, data = out / "text", out / "data"
    text.mkdir(parents=True, exist_ok=True)
    for name in MODULES:
        (text / name).write_bytes((Path(sysconfig.get_paths()["stdlib"]) / name).read_bytes())
    prepare_dataset([text], data, PrepareSettings(split={"valid": 0.3}, block_bytes=4096))
    return data


class Training:
    """A run directory, and the calls of `txl train` that work on it."""

    def __init__(self, path: Path, data: Path, *, num_steps: int) -> None:
        self.path = path
        self.trace = path.with_suffix(".trace")
        self.log = path.with_suffix(".log")
        """Output of all calls."""
        overrides = (f"data.path={data}", f"directory={path}", f"training.num_steps={num_steps}")
        words = ("train", CONFIG, *overrides, *SETTINGS, "--on", "processes", "--ranks", NUM_RANKS)
        self._command = [sys.executable, "-m", "txl_dist", *map(str, words)]

    @contextmanager
    def started(self) -> Iterator[psutil.Popen]:
        """Call `txl train`. On exit no process of it is left, except a sender that delivers."""
        self.trace.unlink(missing_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", TRACE_VARIABLE: str(self.trace)}
        with self.log.open("ab") as log:
            process = psutil.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def reached(self) -> list[Reached]:
        """The points that the ranks of the last call have reached."""
        return read_trace(self.trace)

    def count(self, point: str) -> int:
        return sum(line.point == point for line in self.reached())

    @property
    def last_step(self) -> int:
        lines = lines_of(self.path / "metrics.jsonl")
        return json.loads(lines[-1])["step"] if lines else 0


def disturb(
    run: Training, earlier: list[Kill], *, number: int, num_kills: int, seed: int
) -> Iterator[Kill]:
    """Train to the end, with `num_kills` kills on the way. Yields each kill after it."""
    done = 0
    while True:
        with run.started() as process:
            began = time.monotonic()
            ranks: list[psutil.Process] = []
            while done < num_kills:
                count = sum(kill.run == number for kill in earlier)
                kill = kill_once(
                    run, process, ranks, random.Random(f"{seed} {number} {count}"),
                    number=number, index=count, began=began, first=len(earlier) + 1,
                )  # fmt: skip
                if kill is None:
                    break
                done += 1
                yield kill
                if process.poll() is not None:
                    break
            else:
                require(process.wait(TIMEOUT_SECONDS) == 0, f"see {run.log}")
            _, alive = psutil.wait_procs(ranks, timeout=TIMEOUT_SECONDS)
            require(not alive, f"ranks outlived their launcher: {alive}")
        if process.returncode == 0:
            return


def kill_once(
    run: Training, process: psutil.Popen, ranks: list[psutil.Process], choice: random.Random, *,
    number: int, index: int, began: float, first: int,
) -> Kill | None:  # fmt: skip
    """Send one signal; None if training ended before. Adds the processes of ranks to `ranks`."""
    (aim,) = choice.choices(list(AIMS), list(AIMS.values()))
    (victim_name,) = choice.choices(list(VICTIMS), list(VICTIMS.values()))
    is_gentle = victim_name != "sender" and choice.random() < SIGTERM_SHARE
    number_of_signal = signal.SIGTERM if is_gentle else signal.SIGKILL
    target_step = STEPS_PER_KILL * (index + choice.random())
    delay = choice.uniform(0, LONGEST_DELAY_SECONDS.get(aim, 0.04))

    if aim == "start":
        deadline = time.monotonic() + delay
        wait_until(process, lambda: time.monotonic() > deadline)
    elif aim in ("engine", "resume"):  # a run without a checkpoint does not reach `resume`
        wait_until(process, lambda: run.count(aim) > 0 or run.count("step") > 0)
        time.sleep(delay)
    else:
        wait_until(process, lambda: run.count("step") > 0 and run.last_step >= target_step, 0.02)
        seen = run.count(aim)
        wait_until(process, lambda: run.count(aim) > seen)
        time.sleep(delay)
    ranks[:] = process_list(process, "txl_dist.launch.rank_process")
    victim = find_victim(victim_name, process, ranks)
    killed_at = time.monotonic()
    if process.poll() is not None or not victim.is_running():
        process.wait()
        return None
    victim.send_signal(number_of_signal)
    if victim_name != "sender" or victim is process:
        process.wait(TIMEOUT_SECONDS)
    reached = [line for line in run.reached() if line.time <= killed_at]
    of_victim = [line.point for line in reached if line.pid == victim.pid]
    of_rank_zero = [line.point for line in reached if line.rank == 0]
    steps = [line.time for line in reached if line.point == "step"]
    return Kill(
        number=first, run=number, step=run.last_step, aim=aim, signal=number_of_signal.name,
        phase=(of_victim or of_rank_zero or ["start"])[-1],
        victim="launcher" if victim is process else victim_name,
        exit_code=process.poll(), start_seconds=round(steps[0] - began, 2) if steps else None,
    )  # fmt: skip


def find_victim(
    name: str, process: psutil.Popen, ranks: list[psutil.Process]
) -> psutil.Process | psutil.Popen:
    """The process of that name, or the launcher if it does not exist yet."""
    if name == "sender" and ranks:
        senders = process_list(ranks[0], "txl_dist.tracking.sender")
        return senders[0] if senders else process
    if name.startswith("rank") and len(ranks) == NUM_RANKS:
        return ranks[int(name.removeprefix("rank "))]
    return process


def process_list(parent: Any, module: str) -> list[psutil.Process]:
    """Children of `parent` that run a module, in the order of their start."""
    found = []
    for child in parent.children() if parent.is_running() else []:
        try:
            if module in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return sorted(found, key=lambda child: (child.create_time(), child.pid))


def wait_until(
    process: psutil.Popen, condition: Callable[[], bool], poll_seconds: float = 0.001
) -> None:
    """Wait for the condition or for the end of the process."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while process.poll() is None and not condition():
        require(time.monotonic() < deadline, f"pid {process.pid} made no progress")
        time.sleep(poll_seconds)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def lines_of(path: Path) -> list[str]:
    """The complete lines of a file that may not exist yet."""
    if not path.exists():
        return []
    return path.read_text().rpartition("\n")[0].splitlines()


def summarise(kills: list[Kill], comparisons: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of result.json."""
    starts = [kill.start_seconds for kill in kills if kill.start_seconds is not None]
    return {
        "kills": len(kills),
        "runs": len(comparisons),
        "equal": all(comparison["equal"] for comparison in comparisons),
        "largest_loss_difference": max(c["largest_loss_difference"] for c in comparisons),
        "weights_sha256": comparisons[0]["weights_sha256"],
        "comparisons": comparisons,
        "by_phase": {phase: sum(kill.phase == phase for kill in kills) for phase in PHASES},
        "by_victim": Counter(kill.victim for kill in kills),
        "by_signal": Counter(kill.signal for kill in kills),
        "median_start_seconds": median(starts) if starts else None,
    }


def print_summary(summary: dict[str, Any]) -> None:
    """The histogram and the verdict."""
    most = max(summary["by_phase"].values())
    for phase, count in summary["by_phase"].items():
        print(f"{phase:<14} {count:>5} {'#' * round(40 * count / most)}")
    for key in ("by_victim", "by_signal", "median_start_seconds", "weights_sha256"):
        print(f"{key.replace('_', ' ')}: {summary[key]}")
    verdict = "equal to the undisturbed run, bit for bit" if summary["equal"] else "DIFFERENT"
    print(f"{summary['kills']} kills in {summary['runs']} runs: {verdict}")


if __name__ == "__main__":
    main()
