"""Exact evaluation on one and two workers: time, and context that is read twice.

    python benchmarks/evaluation_workers.py [--rounds 3]

The same split is scored by one and by two worker processes with one thread each, alternately. The
workers have already started and loaded the model, so the time is that of scoring. Scores after
kills are tested: tests/faults/test_evaluation_kills.py.

Exits with 1 if the ratio of the times is below its limit, which is meant for a machine that has a
free core for each worker.
"""

import argparse
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from data_pipeline.system.workers import ProcessWorkers
from txl_dist.evaluation.distributed import evaluate_on_workers, plan_spec
from txl_dist.evaluation.spec import EvaluationSpec, evaluation_spec

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
LIMIT_RATIO = 1.8
LIMIT_OVERHEAD = 0.05


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="txl-workers-") as directory:
        data, run = Path(directory) / "data", Path(directory) / "run"
        prepare(data)
        settings = (f"data.path={data}", f"directory={run}", "training.num_steps=2",
                    "optimizer.warmup_steps=1", "evaluation.split=null")  # fmt: skip
        txl("train", CONFIG, *settings, "--on", "processes", "tracking.enabled=false")
        holds = compare_times(run, data, arguments.rounds)
    sys.exit(not holds)


def prepare(data: Path) -> None:
    """A package of the standard library."""
    sources = Path(sysconfig.get_paths()["stdlib"]) / "email"
    txl("prepare", sources, "--out", data, "--format", "text", "--split", "valid=0.7")


def compare_times(run: Path, data: Path, num_rounds: int) -> bool:
    spec = evaluation_spec(run, data, split="valid", batch=2)
    seconds: dict[int, list[float]] = {1: [], 2: []}
    overhead = 0.0
    with ProcessWorkers(1) as one, ProcessWorkers(2) as two:
        for number in range(num_rounds + 1):
            for workers in (one, two):
                began = time.monotonic()
                overhead = score(spec, workers)
                if number:  # the first round starts the workers
                    seconds[workers.num_workers].append(time.monotonic() - began)
    ratios = [one / two for one, two in zip(seconds[1], seconds[2], strict=True)]
    ratio = statistics.median(ratios)
    print(f"seconds of one worker {statistics.median(seconds[1]):.1f}, of two "
          f"{statistics.median(seconds[2]):.1f}, one thread each")  # fmt: skip
    print(f"ratio {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})   limit {LIMIT_RATIO}")
    print(f"context read again {overhead:.2%}   limit {LIMIT_OVERHEAD:.0%}", flush=True)
    return ratio >= LIMIT_RATIO and overhead <= LIMIT_OVERHEAD


def score(spec: EvaluationSpec, workers: ProcessWorkers) -> float:
    """Context tokens as a fraction of the scored tokens."""
    (result,) = evaluate_on_workers([plan_spec(spec)], workers)
    return result.context_overhead


def txl(*words: object) -> None:
    """Run one command. Exits with what it printed if it fails."""
    ended = subprocess.run(
        [sys.executable, "-m", "txl_dist", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if ended.returncode:
        sys.exit(f"txl {' '.join(map(str, words))} failed:\n{ended.stdout}{ended.stderr}")


if __name__ == "__main__":
    main()
