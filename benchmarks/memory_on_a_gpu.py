"""What the recurrent memory is worth on one GPU, at equal seconds of training.

    txl prepare CORPUS --out data/c --tokenizer byte --split valid=0.02 --shuffle 1
    python benchmarks/memory_on_a_gpu.py data/c --seconds 100 --out runs/memory-on-a-gpu

`txl train` of configs/modern/30m.yaml with 32,768 bytes per step, three times:

    memory     512 lanes in turns, segments of 512, a memory of 512
    none       the same lanes, without memory
    windows    shuffled pieces of 1,024, without memory: the span of memory and segment together

A short run measures each arm's tokens per second, which the log reports without the start; the
rate then falls to 0 over as many steps as fit in --seconds. Every model is read in segments of 256
with memories of 0 to 4,096, and its best score counts.

The claim, written before a GPU has run it (2026-11-29): `memory` is ahead of `none` by 0.02 bits
per byte, and, with a memory of 4,096 in evaluation, ahead of the best of `windows`.

Elsewhere, to try it: --settings model.n_layer=1 training.compile=false ... --seconds 5.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from txl_dist.tracking.journal import read_metrics

MEMORY_LANES = ("data.num_lanes=512", "data.lanes_per_step=64", "data.tgt_len=512")
ARMS = {
    "memory": (*MEMORY_LANES, "model.mem_len=512"),
    "none": (*MEMORY_LANES, "model.mem_len=0"),
    "windows": (
        "data.piece_len=1024", "data.tgt_len=1024", "data.num_lanes=512", "data.lanes_per_step=32",
        "model.mem_len=0",
    ),
}  # fmt: skip
STEP_TOKENS = 32_768
TIMED_STEPS = 60
READ_IN, MEMORIES = 256, (0, 256, 512, 1024, 2048, 4096)
CLAIMED_BITS = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="dataset of bytes with a split valid")
    parser.add_argument("--out", type=Path, required=True, help="directory of runs and results")
    parser.add_argument("--seconds", type=float, default=100, help="of training, for each arm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scored", type=int, default=2_000_000, help="bytes of valid")
    parser.add_argument("--settings", nargs="*", default=[], help="KEY=VALUE for all arms")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = {}
    for arm in ARMS:
        results[arm] = run_arm(arm, options)
        with (options.out / "results.jsonl").open("a") as file:
            file.write(json.dumps({"arm": arm, "seed": options.seed, **results[arm]}) + "\n")
    print_results(results)


def run_arm(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time, train and read one model."""
    speed = train(arm, options, TIMED_STEPS, f"{arm}-timed")
    num_steps = max(1, round(options.seconds * speed / STEP_TOKENS))
    tokens_per_second = train(arm, options, num_steps, f"{arm}-{options.seed}")
    sweep = ",".join(map(str, MEMORIES))
    output = txl(
        "eval", options.out / f"{arm}-{options.seed}", options.data, "--split", "valid",
        "--tgt-len", READ_IN, "--sweep", f"mem_len={sweep}", "--max-tokens", options.scored,
        "--precision", "bf16", "--json",
    )  # fmt: skip
    candidates = json.loads(output)["candidates"]
    scores = {score["mem_len"]: score["bits_per_byte"] for score in candidates}
    return {"steps": num_steps, "tokens_per_second": round(tokens_per_second), "scores": scores}


def train(arm: str, options: argparse.Namespace, num_steps: int, name: str) -> float:
    """The tokens per second of a run, without its first lines."""
    run = options.out / name
    txl(
        "train", "modern/30m", "--on", "processes", "--ranks", 1, f"data.path={options.data}",
        f"directory={run}", f"seed={options.seed}", *ARMS[arm], "data.reset=document",
        "evaluation.split=null", "tracking.enabled=false", f"training.num_steps={num_steps}",
        "training.log_interval_steps=10", f"training.checkpoint_interval_steps={num_steps}",
        f"optimizer.warmup_steps={min(200, max(1, num_steps // 5))}", *options.settings,
    )  # fmt: skip
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "tokens_per_second" in line]
    return statistics.median(line["tokens_per_second"] for line in lines[len(lines) // 3 :])


def txl(*words: object) -> str:
    """Print and run one command; returns its standard output, and exits if it fails."""
    command = ["txl", *map(str, words)]
    print("\n==", " ".join(command), file=sys.stderr, flush=True)
    ended = subprocess.run(
        [sys.executable, "-m", "txl_dist", *command[1:]],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
    )
    if ended.returncode:
        sys.exit(ended.returncode)
    return ended.stdout


def print_results(results: dict[str, dict[str, Any]]) -> None:
    memories = " | ".join(f"given {length:,}" for length in MEMORIES)
    print(f"| trained | steps | tokens/s | {memories} |\n" + "|---" * (3 + len(MEMORIES)) + "|")
    for arm, result in results.items():
        cells = (f"{bits:.4f}" for bits in result["scores"].values())
        speed = f"{result['tokens_per_second']:,}"
        print(f"| {arm} | {result['steps']:,} | {speed} | {' | '.join(cells)} |")
    best = {arm: min(result["scores"].values()) for arm, result in results.items()}
    longest = results["memory"]["scores"][MEMORIES[-1]]
    print(
        f"\nnone minus memory: {best['none'] - best['memory']:+.4f} bits per byte, claimed "
        f"{CLAIMED_BITS:+.4f}; windows minus memory given {MEMORIES[-1]:,}: "
        f"{best['windows'] - longest:+.4f}, claimed more than 0"
    )


if __name__ == "__main__":
    main()
