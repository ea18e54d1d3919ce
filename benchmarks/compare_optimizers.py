"""AdamW and Muon at several learning rates on the quickstart: when each reaches the same loss.

    python benchmarks/compare_optimizers.py DATA [k.e.y=value ...] --steps 800

DATA is the dataset of the quickstart (`make quickstart` prepares data/stdlib). Every run has the
same seed, so the same initial weights and the same tokens per step; only the optimizer differs. The
loss to reach is the lowest final validation loss of the first optimizer in the list. Seconds are
those of steps alone, at the mean rate of the run. Settings of all runs follow DATA, as in
`txl train`.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from txl_dist.config.config_file import load_run_config
from txl_dist.launch.processes import ProcessLauncher
from txl_dist.training.job import TrainJob

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """One optimizer at one learning rate."""

    optimizer: str
    lr: float
    training_loss: float
    """Mean of the last tenth of the run, in nats per token."""
    valid_losses: dict[int, float]
    """Step -> validation loss, in nats per token."""
    step_seconds: float

    @property
    def final_loss(self) -> float:
        return self.valid_losses[max(self.valid_losses)]

    def first_step_with(self, loss: float) -> int | None:
        """The first evaluated step with a validation loss of at most `loss`."""
        return min(
            (step for step, value in self.valid_losses.items() if value <= loss), default=None
        )


def main() -> None:
    """Train every optimizer at every rate and print one row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="dataset with a split valid")
    parser.add_argument("overrides", nargs="*", help="settings of all runs: k.e.y=value")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--evaluations", type=int, default=32, help="of each run")
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon"])
    parser.add_argument("--lrs", type=float, nargs="+", default=[2e-3, 4e-3, 8e-3, 16e-3, 32e-3])
    arguments = parser.parse_args()
    common = [
        f"data.path={arguments.data}",
        f"training.num_steps={arguments.steps}",
        f"evaluation.interval_steps={max(1, arguments.steps // arguments.evaluations)}",
        "evaluation.max_tokens=50000",
        f"training.checkpoint_interval_steps={arguments.steps}",
        "tracking.enabled=false",
        *arguments.overrides,
    ]
    runs = [
        train_with(optimizer, lr, common)
        for optimizer in arguments.optimizers
        for lr in arguments.lrs
    ]
    print_comparison(runs)


def train_with(optimizer: str, lr: float, settings: list[str]) -> TrainedRun:
    """Train on one rank in a separate process."""
    with tempfile.TemporaryDirectory() as directory:
        own = (f"optimizer.name={optimizer}", f"optimizer.lr={lr}", f"directory={directory}")
        job = TrainJob(config=load_run_config(CONFIG, [*settings, *own]))
        ProcessLauncher().train(job, num_ranks=1, on_line=lambda line: print(line, file=sys.stderr))
        lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    steps = [line for line in metrics if "loss" in line]
    tokens = steps[-1]["tokens"] / steps[-1]["step"]
    return TrainedRun(
        optimizer=optimizer,
        lr=lr,
        training_loss=statistics.fmean(line["loss"] for line in steps[-max(1, len(steps) // 10) :]),
        valid_losses={line["step"]: line["valid/loss"] for line in metrics if "valid/loss" in line},
        step_seconds=statistics.fmean(tokens / line["tokens_per_second"] for line in steps),
    )


def print_comparison(runs: list[TrainedRun]) -> None:
    """One row for each run; the last columns say when it reached the loss of the best first one."""
    goal = min(run.final_loss for run in runs if run.optimizer == runs[0].optimizer)
    print(f"| optimizer | lr | training loss | valid loss | s per step | steps to {goal:.4f} | s |")
    print("|---|---|---|---|---|---|---|")
    for run in runs:
        step = run.first_step_with(goal)
        reached = "not reached | " if step is None else f"{step} | {step * run.step_seconds:.0f}"
        print(
            f"| {run.optimizer} | {run.lr:g} | {run.training_loss:.4f} | {run.final_loss:.4f} "
            f"| {run.step_seconds:.3f} | {reached} |"
        )


if __name__ == "__main__":
    main()
