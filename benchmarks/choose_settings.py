"""Which learning rates and warm-ups learn at all: the final loss of short runs, and the plateau.

    python benchmarks/choose_settings.py CONFIG DATA [k.e.y=value ...] --lrs 1e-3 --warmups 20 100

Every pair of rate and warm-up is trained once per seed. A run whose loss stays at the unigram
entropy of the data has learned the frequencies of the tokens and nothing of their order. Settings
of all runs follow DATA, as in `txl train`. Losses only: the runs may share the machine with others.
"""

import argparse
import json
import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path

from txl_dist.config.config_file import load_run_config
from txl_dist.launch.processes import ProcessLauncher
from txl_dist.training.spec import TrainSpec


def main() -> None:
    """Train every combination and print one row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("overrides", nargs="*", help="settings of all runs: k.e.y=value")
    parser.add_argument("--lrs", type=float, nargs="+", required=True)
    parser.add_argument("--warmups", type=int, nargs="+", required=True, help="in steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    arguments = parser.parse_args()
    print(f"| lr | warm-up | {' | '.join(f'seed {seed}' for seed in arguments.seeds)} |")
    print(f"|---|---|{'---|' * len(arguments.seeds)}", flush=True)
    for lr, warmup in product(arguments.lrs, arguments.warmups):
        losses = [
            train_with(
                arguments.config,
                f"data.path={arguments.data}",
                f"optimizer.lr={lr}",
                f"optimizer.warmup_steps={warmup}",
                f"seed={seed}",
                *arguments.overrides,
            )
            for seed in arguments.seeds
        ]
        print(f"| {lr:g} | {warmup} | {' | '.join(f'{loss:.3f}' for loss in losses)} |", flush=True)


def train_with(config: Path, *overrides: str) -> float:
    """Training loss of the last tenth of a run, in nats per token."""
    with tempfile.TemporaryDirectory() as directory:
        own = (f"directory={directory}", "evaluation.split=null", "tracking.enabled=false")
        spec = TrainSpec(config=load_run_config(config, [*overrides, *own]))
        ProcessLauncher().train(
            spec, num_ranks=1, on_line=lambda line: print(line, file=sys.stderr)
        )
        lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])


if __name__ == "__main__":
    main()
