"""A model trained on windows, continued for the same CPU time on windows, or on lanes with memory.

    python benchmarks/continue_a_model.py data/stdlib data/wikitext --out runs/continued.jsonl
    python benchmarks/continue_a_model.py --out runs/continued.jsonl --table

The model is that of configs/modern/quickstart.yaml, first trained for --steps steps on windows of
256 tokens in shuffled order, as most models are. Then its weights, with a fresh optimizer at half
the rate, are trained for --seconds more

    windows   as before
    memory    on lanes: segments of 64 with a memory of 128, in the order of the documents

and all three are read in both ways: in windows that overlap by half, as models without memory are,
and in segments of 64 with a memory of 128 or 256. One thread; the seconds are those of the steps.
Each (text, seed) is one line of --out; a second call runs what is missing.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from compare_blocks import (
    VARIANTS,
    held_out_window_nats,
    results,
    segment_nats,
    transformer_xl_steps,
)

from txl_dist import TransformerXL

RATE = "optimizer.lr=4e-3"
CONTINUED = {
    "windows": (*VARIANTS["pieces-256"], RATE),
    "memory": (*VARIANTS["modern"], RATE),
}
TIMED_STEPS = 24


def main() -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="*", type=Path, help="datasets with a split valid")
    parser.add_argument("--out", type=Path, required=True, help="file of the results")
    parser.add_argument("--steps", type=int, default=400, help="of the first model")
    parser.add_argument("--seconds", type=float, default=100, help="CPU-seconds to continue")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--table", action="store_true", help="print the results, run nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    VARIANTS.update({f"continued-{name}": settings for name, settings in CONTINUED.items()})
    done = {(run["data"], run["seed"]) for run in results(arguments.out)}
    for data in arguments.data:
        for seed in arguments.seeds:
            if (data.name, seed) not in done:
                run = compare(data, seed, arguments.steps, arguments.seconds)
                with arguments.out.open("a") as file:
                    file.write(json.dumps(run) + "\n")
    if arguments.table:
        print_table(results(arguments.out))


def compare(data: Path, seed: int, num_steps: int, seconds: float) -> dict[str, Any]:
    """Train the first model and both continuations; their scores in every way to read."""
    step, _, first = transformer_xl_steps("pieces-256", data, num_steps, seed)
    for number in range(1, num_steps + 1):
        step(number)
    run: dict[str, Any] = {"data": data.name, "seed": seed, "steps": {"first": num_steps}}
    run["nats"] = {"first": readings(first, data)}
    for name in CONTINUED:
        count = steps_in(f"continued-{name}", first, data, seed, seconds)
        step, _, model = transformer_xl_steps(f"continued-{name}", data, count, seed + 1000)
        model.load_state_dict(first.state_dict())
        run.setdefault("seconds", {})[name] = sum(step(n) for n in range(1, count + 1))
        run["steps"][name], run["nats"][name] = count, readings(model, data)
    print(json.dumps(run), flush=True)
    return run


def steps_in(name: str, first: torch.nn.Module, data: Path, seed: int, seconds: float) -> int:
    """How many steps take so long, by the median of some."""
    step, _, model = transformer_xl_steps(name, data, TIMED_STEPS, seed)
    model.load_state_dict(first.state_dict())
    times = [step(number) for number in range(1, TIMED_STEPS + 1)]
    return round(seconds / statistics.median(times))


def readings(model: TransformerXL, data: Path) -> dict[str, float]:
    """Held-out nats per token of each way to read."""
    return {
        "windows of 256": held_out_window_nats(model, data, 256),
        "windows of 512": held_out_window_nats(model, data, 512),
        "memory 128": segment_nats(model, data, 64, 128),
        "memory 256": segment_nats(model, data, 64, 256),
    }


def print_table(runs: list[dict[str, Any]]) -> None:
    """Means over seeds, lowest and highest."""
    ways = list(runs[0]["nats"]["first"])
    print(f"| text | model | {' | '.join(ways)} | CPU-s |")
    print(f"|---|---|{'--:|' * (len(ways) + 1)}")
    for data in sorted({run["data"] for run in runs}):
        for name in ("first", *CONTINUED):
            own = [run for run in runs if run["data"] == data]
            cells = []
            for way in ways:
                nats = [run["nats"][name][way] for run in own]
                cells.append(f"{statistics.mean(nats):.3f} ({min(nats):.3f} to {max(nats):.3f})")
            seconds = [run["seconds"].get(name, 0) for run in own]
            print(f"| {data} | {name} | {' | '.join(cells)} | {statistics.mean(seconds):.0f} |")


if __name__ == "__main__":
    main()
