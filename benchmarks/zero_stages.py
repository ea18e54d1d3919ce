"""What ZeRO 1 and 2 cost on CPUs against stage 0.

    python benchmarks/zero_stages.py DATA [k.e.y=value ...] [--stages 0 1 2] [--rounds 3]

Two ranks as plain processes train a model of width 512 (12.8 million parameters) on 1,024 tokens a
step, at each stage in turn. Speeds are compared inside a round, because the machine may be shared.
The overrides apply to all stages but 0. Where the time goes: `training.profile_steps`.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from txl_dist.config.config_file import load_run_config
from txl_dist.launch.processes import ProcessLauncher
from txl_dist.training.spec import TrainSpec

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
MODEL = (
    *("model.n_layer=4", "model.d_model=512", "model.n_head=8", "model.d_head=64"),
    *("model.d_inner=2048", "data.num_lanes=8", "evaluation.split=null"),
    *("tracking.enabled=false", "training.log_interval_steps=5", "optimizer.warmup_steps=5"),
)


def main() -> None:
    """Print tokens per second by round, and the ratios to stage 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("overrides", nargs="*", help="settings of all stages but 0: k.e.y=value")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    ratios: dict[int, list[float]] = {stage: [] for stage in arguments.stages}
    for number in range(arguments.rounds):
        speeds = {}
        for stage in arguments.stages:
            overrides = arguments.overrides if stage else []
            speeds[stage] = train(arguments.data, stage, arguments.steps, overrides)
            ratios[stage].append(speeds[stage] / speeds[arguments.stages[0]])
        shown = ", ".join(f"stage {stage} {speed:,.0f}" for stage, speed in speeds.items())
        print(f"round {number + 1}, tokens per second: {shown}", flush=True)
    for stage, values in ratios.items():
        print(f"stage {stage}: {statistics.median(values):.2f} of stage {arguments.stages[0]}")


def train(data: Path, stage: int, num_steps: int, overrides: list[str]) -> float:
    """Median tokens per second of a run."""
    with tempfile.TemporaryDirectory() as directory:
        own = (
            f"data.path={data}",
            f"directory={directory}",
            f"training.num_steps={num_steps}",
            f"training.checkpoint_interval_steps={10 * num_steps}",
            f"deepspeed.zero_stage={stage}",
        )
        spec = TrainSpec(config=load_run_config(CONFIG, [*MODEL, *own, *overrides]))
        ProcessLauncher().train(spec, num_ranks=2, on_line=lambda line: None)
        lines = map(json.loads, (Path(directory) / "metrics.jsonl").read_text().splitlines())
        speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    return statistics.median(speeds[1:-1])


if __name__ == "__main__":
    main()
