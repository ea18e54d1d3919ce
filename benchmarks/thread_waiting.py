"""What it costs and brings how long the threads of a rank spin before they sleep, on CPUs.

    python benchmarks/thread_waiting.py [--rounds 20] [--seconds 0.5] [--realtime] [k.e.y=value ...]

One process per policy trains the model of `modern/quickstart`, with a thread per core. They take
turns of some seconds, so that other load of the machine affects all alike. A row shows medians over
the rounds. `--realtime` runs them before all other processes (root only): a quiet machine.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from txl_dist.config.config_file import load_run_config
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.process import SPIN_COUNT, keep_freed_memory

DEFAULT = "libgomp's default"
POLICIES = {
    DEFAULT: {"GOMP_SPINCOUNT": "300000"},
    f"spin {SPIN_COUNT}, ours": {"GOMP_SPINCOUNT": SPIN_COUNT},
    "sleep immediately": {"GOMP_SPINCOUNT": "0"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
CONFIG = Path(__file__).parents[1] / "configs" / "modern" / "quickstart.yaml"
VOCAB_SIZE = 256


def main() -> None:
    """Start a process per policy, let them take turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--realtime", action="store_true")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="settings of the model: k.e.y=value")
    options = parser.parse_args()
    if options.train:
        train_on_request(options.seconds, options.overrides)
        return
    priority = ["chrt", "--fifo", "1"] if options.realtime else []
    command = [*priority, sys.executable, *sys.argv, "--train"]
    with ExitStack() as stack:
        processes = {}
        for name, variables in POLICIES.items():
            process = subprocess.Popen(
                command,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.kill)
            processes[name] = process
        rounds = [one_round(processes) for _ in range(1 + options.rounds)][1:]  # a warm-up first
    print(f"{'':<18} tokens/s  of default  CPU-seconds per second")
    for name in POLICIES:
        rate, share = (statistics.median(each[name][n] for each in rounds) for n in (0, 1))
        of_default = statistics.median(each[name][0] / each[DEFAULT][0] for each in rounds)
        print(f"{name:<18} {rate:>8,.0f}  {of_default:>10.2f}  {share:>10.2f}")


def one_round(processes: dict[str, subprocess.Popen[str]]) -> dict[str, tuple[float, float]]:
    """Tokens per second and CPU seconds per second of each process, in random order."""
    measured = {}
    for name in random.sample([*processes], len(processes)):
        process = processes[name]
        assert process.stdin is not None
        assert process.stdout is not None
        print(file=process.stdin, flush=True)
        rate, share = map(float, process.stdout.readline().split())
        measured[name] = rate, share
    return measured


def train_on_request(seconds: float, overrides: list[str]) -> None:
    """Train for some seconds whenever a line arrives, and print what it took."""
    keep_freed_memory()
    config = load_run_config(CONFIG, [f"model.vocab_size={VOCAB_SIZE}", *overrides])
    shape = config.data.lanes_per_step or config.data.num_lanes, config.segment_len
    model = TransformerXL(config.model, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    memory = model.empty_memory(shape[0])
    ids, age = torch.randint(VOCAB_SIZE, shape), torch.full(shape, 1_000_000)
    for _ in sys.stdin:
        num_steps, begin, cpu_begin = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() < begin + seconds:
            nats_BT, memory = model(ids, ids, age, memory)
            nats_BT.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            num_steps += 1
        passed, cpu = time.perf_counter() - begin, time.process_time() - cpu_begin
        print(num_steps * ids.numel() / passed, cpu / passed, flush=True)


if __name__ == "__main__":
    main()
