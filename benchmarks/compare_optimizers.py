"""AdamW and Muon at several learning rates on the quickstart: losses matched by step.

    python benchmarks/compare_optimizers.py DATA [k.e.y=value ...] --steps 250

DATA is the dataset of the quickstart (`make quickstart` prepares data/stdlib). Every run has the
same seed, so the same initial weights and the same tokens per step; only the optimizer differs. A
row shows the mean training loss of the last tenth of the run and the validation loss at its end.
Settings of all runs follow DATA, as in `txl train`.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from txl_dist.config.config_file import load_run_config
from txl_dist.launch.processes import ProcessLauncher
from txl_dist.training.job import TrainJob

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"


def main() -> None:
    """Train every optimizer at every rate and print one row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="dataset with a split valid")
    parser.add_argument("overrides", nargs="*", help="settings of all runs: k.e.y=value")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon"])
    parser.add_argument("--lrs", type=float, nargs="+", default=[2e-3, 4e-3, 8e-3])
    arguments = parser.parse_args()
    common = [
        f"data.path={arguments.data}",
        f"training.num_steps={arguments.steps}",
        f"evaluation.interval_steps={arguments.steps}",
        f"training.checkpoint_interval_steps={arguments.steps}",
        "tracking.enabled=false",
        *arguments.overrides,
    ]
    print("| optimizer | lr | training loss | valid loss |\n|---|---|---|---|", flush=True)
    for name in arguments.optimizers:
        for lr in arguments.lrs:
            settings = [*common, f"optimizer.name={name}", f"optimizer.lr={lr}"]
            training, valid = final_losses(settings)
            print(f"| {name} | {lr:g} | {training:.4f} | {valid:.4f} |", flush=True)


def final_losses(settings: list[str]) -> tuple[float, float]:
    """Train with one rank in a separate process; mean loss of the last tenth, validation loss."""
    with tempfile.TemporaryDirectory() as run:
        job = TrainJob(config=load_run_config(CONFIG, [*settings, f"directory={run}"]))
        ProcessLauncher().train(job, num_ranks=1, on_line=lambda line: print(line, file=sys.stderr))
        lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    training = [line["loss"] for line in metrics if "loss" in line]
    valid = [line["valid/loss"] for line in metrics if "valid/loss" in line]
    return statistics.fmean(training[-max(1, len(training) // 10) :]), valid[-1]


if __name__ == "__main__":
    main()
