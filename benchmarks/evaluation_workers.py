"""Exact evaluation on one and two workers: time, context read twice, and scores after kills.

    python benchmarks/evaluation_workers.py [--rounds 3] [--kills 10]

1. The same split is scored by one and by two worker processes with one thread each, alternately.
   The workers have already started and loaded the model, so the time is that of scoring.
2. `txl eval --workers 2` runs repeatedly. At a random moment a worker or the command itself
   is killed by SIGKILL; a killed command is continued with `--resume`. Every score must equal that
   of an undisturbed evaluation to the last digit.

Exits with 1 if a score differs or the ratio of the times is below its limit, which is meant for a
machine that has a free core for each worker.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import psutil

from data_pipeline.system.workers import ProcessWorkers
from txl_dist.evaluation.distributed import evaluate_on_workers, plan_job
from txl_dist.evaluation.job import EvaluationJob, evaluation_job

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
LIMIT_RATIO = 1.8
LIMIT_OVERHEAD = 0.05


def main() -> None:
    """Run both parts and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="txl-workers-") as directory:
        data, run = Path(directory) / "data", Path(directory) / "run"
        prepare(data)
        settings = (f"data.path={data}", f"directory={run}", "training.num_steps=2",
                    "optimizer.warmup_steps=1", "evaluation.split=null")  # fmt: skip
        txl("train", CONFIG, *settings, "--on", "processes", "tracking.enabled=false")
        holds = compare_times(run, data, arguments.rounds)
        if arguments.kills:
            holds &= compare_after_kills(run, data, arguments.kills, random.Random(arguments.seed))
    sys.exit(not holds)


def prepare(data: Path) -> None:
    """A package of the standard library: a split to be timed, and a smaller one for the kills."""
    sources = Path(sysconfig.get_paths()["stdlib"]) / "email"
    txl("prepare", sources, "--out", data, "--format", "text", "--split", "valid=0.7,test=0.2")


def compare_times(run: Path, data: Path, num_rounds: int) -> bool:
    job = evaluation_job(run, data, split="valid", batch=2)
    seconds: dict[int, list[float]] = {1: [], 2: []}
    overhead = 0.0
    with ProcessWorkers(1) as one, ProcessWorkers(2) as two:
        for number in range(num_rounds + 1):
            for workers in (one, two):
                began = time.monotonic()
                overhead = score(job, workers)
                if number:  # the first round starts the workers
                    seconds[workers.num_workers].append(time.monotonic() - began)
    ratios = [one / two for one, two in zip(seconds[1], seconds[2], strict=True)]
    ratio = statistics.median(ratios)
    print(f"seconds of one worker {statistics.median(seconds[1]):.1f}, of two "
          f"{statistics.median(seconds[2]):.1f}, one thread each")  # fmt: skip
    print(f"ratio {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})   limit {LIMIT_RATIO}")
    print(f"context read again {overhead:.2%}   limit {LIMIT_OVERHEAD:.0%}", flush=True)
    return ratio >= LIMIT_RATIO and overhead <= LIMIT_OVERHEAD


def score(job: EvaluationJob, workers: ProcessWorkers) -> float:
    """Context tokens as a fraction of the scored tokens."""
    (result,) = evaluate_on_workers([plan_job(job)], workers)
    return result.overhead


def compare_after_kills(run: Path, data: Path, num_kills: int, moments: random.Random) -> bool:
    scores = run / "evaluations"
    command = ("eval", run, data, "--split", "test", "--on", "processes", "--workers", 2,
               "--batch", 4, "--json")  # fmt: skip
    began = time.monotonic()
    expected = json.loads(txl(*command))
    duration = time.monotonic() - began
    shutil.rmtree(scores)
    print("| kill | of | finished batches | score |\n|---|---|---|---|", flush=True)
    done = num_different = 0
    pending: list[str] = []  # kills in the evaluation that has not ended yet
    while done < num_kills or pending:
        process = start(*command, "--resume")
        victim = ""
        if done < num_kills:
            time.sleep(moments.uniform(0.1, 0.9) * duration)
            victim = kill(process, moments.choice(["a worker", "the command"]))
        output, errors = process.communicate()
        if victim:
            done += 1
            pending.append(f"| {done} | {victim} | {num_batches(scores)}")
        if process.returncode == 0:
            is_equal = json.loads(output) == expected
            num_different += not is_equal
            for line in pending:
                print(f"{line} | {'equal' if is_equal else 'DIFFERENT'} |", flush=True)
            pending.clear()
            shutil.rmtree(scores)
        elif victim != "the command":
            sys.exit(f"the evaluation failed after the kill of {victim}:\n{errors}")
    print(f"{num_kills} kills, {num_different} different scores")
    return not num_different


def kill(process: "subprocess.Popen[str]", choice: str) -> str:
    """SIGKILL a worker, or the command if there is no worker; what was killed, "" if it ended."""
    try:
        parent = psutil.Process(process.pid)
        workers = [each for each in parent.children() if "spawn_main" in " ".join(each.cmdline())]
        if process.poll() is not None:
            return ""
        if choice == "a worker" and workers:
            random.choice(workers).kill()
            return choice
        process.kill()
    except psutil.NoSuchProcess:
        return ""
    return "the command"


def num_batches(scores: Path) -> int:
    """Finished batches on disk; each is a line after the header."""
    return sum(len(path.read_bytes().splitlines()) - 1 for path in scores.glob("*.jsonl"))


def start(*words: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "txl_dist", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def txl(*words: object) -> str:
    """Run one command; its standard output. Exits with what it printed if it fails."""
    process = start(*words)
    output, errors = process.communicate()
    if process.returncode:
        sys.exit(f"txl {' '.join(map(str, words))} failed:\n{output}{errors}")
    return output


if __name__ == "__main__":
    main()
