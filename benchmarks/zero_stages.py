"""What ZeRO 1 and 2 cost on CPUs against stage 0, and where the time goes.

    python benchmarks/zero_stages.py DATA [k.e.y=value ...] [--stages 0 1 2] [--rounds 3]

Two ranks as plain processes train a model of width 512 (12.8 million parameters) on 1,024 tokens a
step, at each stage in turn. Speeds are compared inside a round, because the machine may be shared.
The overrides apply to all stages but 0. The operations of one step are those of torch's profiler.
"""

import argparse
import json
import re
import statistics
import tempfile
from pathlib import Path

from txl_dist.config.config_file import load_run_config
from txl_dist.launch.processes import ProcessLauncher
from txl_dist.training.job import TrainJob

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
MODEL = (
    *("model.n_layer=4", "model.d_model=512", "model.n_head=8", "model.d_head=64"),
    *("model.d_inner=2048", "data.num_lanes=8", "evaluation.split=null"),
    *("tracking.enabled=false", "training.log_interval_steps=5", "optimizer.warmup_steps=5"),
)
TOP = 12
"""Operations that are listed."""


def main() -> None:
    """Print tokens per second by round, the ratios to stage 0, and the operations of a step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("overrides", nargs="*", help="settings of all stages but 0: k.e.y=value")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    ratios: dict[int, list[float]] = {stage: [] for stage in arguments.stages}
    tables = {}
    for number in range(arguments.rounds):
        speeds = {}
        for stage in arguments.stages:
            overrides = arguments.overrides if stage else []
            speeds[stage], tables[stage] = train(arguments.data, stage, arguments.steps, overrides)
            ratios[stage].append(speeds[stage] / speeds[arguments.stages[0]])
        shown = ", ".join(f"stage {stage} {speed:,.0f}" for stage, speed in speeds.items())
        print(f"round {number + 1}, tokens per second: {shown}", flush=True)
    for stage, values in ratios.items():
        print(f"stage {stage}: {statistics.median(values):.2f} of stage {arguments.stages[0]}")
    for stage, table in tables.items():
        print(f"\nstage {stage}, operations of rank 0 in one step, ms of their own:")
        print("\n".join(f"  {milliseconds:8.1f}  {name}" for name, milliseconds in table))


def train(
    data: Path, stage: int, num_steps: int, overrides: list[str]
) -> tuple[float, list[tuple[str, float]]]:
    """Median tokens per second of a run, and the operations of its last step but one."""
    with tempfile.TemporaryDirectory() as directory:
        own = (
            f"data.path={data}",
            f"directory={directory}",
            f"training.num_steps={num_steps}",
            f"training.checkpoint_interval_steps={10 * num_steps}",
            f"training.profile_steps=[{num_steps - 1},{num_steps - 1}]",
            f"deepspeed.zero_stage={stage}",
        )
        job = TrainJob(config=load_run_config(CONFIG, [*MODEL, *own, *overrides]))
        ProcessLauncher().train(job, num_ranks=2, on_line=lambda line: None)
        lines = map(json.loads, (Path(directory) / "metrics.jsonl").read_text().splitlines())
        speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
        (trace,) = Path(directory, "profile").glob("rank-0-*.json")
        events = json.loads(trace.read_text())["traceEvents"]
    return statistics.median(speeds[1:-1]), own_times(events)[:TOP]


def own_times(events: list[dict[str, object]]) -> list[tuple[str, float]]:
    """(operation, ms without the operations that it calls), the longest first."""
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    total: dict[str, float] = {}
    for thread in {event["tid"] for event in spans}:
        own = [event for event in spans if event["tid"] == thread]
        open_spans: list[tuple[float, str]] = []
        for event in sorted(own, key=lambda each: (each["ts"], -each["dur"])):
            while open_spans and open_spans[-1][0] <= event["ts"]:
                open_spans.pop()
            name = re.sub(r"\(.*| at 0x.*", "", str(event["name"]))
            total[name] = total.get(name, 0.0) + event["dur"] / 1000
            if open_spans:
                total[open_spans[-1][1]] -= event["dur"] / 1000
            open_spans.append((event["ts"] + event["dur"], name))
    return sorted(total.items(), key=lambda item: -item[1])


if __name__ == "__main__":
    main()
