"""Benefit of the memory: one small model with memory, without, and a vanilla Transformer.

    python benchmarks/memory_study.py --out runs/memory-study
    python benchmarks/memory_study.py --out runs/memory-study --steps 20     # only to try it

The text is the source code of the Python standard library, in bytes. The three configs of
configs/baselines are trained on the same tokens with the same seed, and then compared:

    perplexity by mem_len                  txl eval --mem-len
    relative effective context length      txl recl
    how far a copy is found                txl bench recall
    loss at the start of a segment         benchmarks/what_memory_costs_and_brings.py

Every command is printed before it runs. About half an hour on two CPU cores with the default
number of steps. A stopped study continues with the same command; a finished run is not trained
again. --out gets study.json, mem_len.png and the runs.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from quickstart import SOURCES, collect_sources, say

ROOT = Path(__file__).parents[1]
MODELS = ("with-memory", "no-memory", "vanilla")
MEM_LENS = (0, 32, 64, 128, 256, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("data/baselines"))
    parser.add_argument("--steps", type=int, default=800, help="of each of the three runs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--split", default="valid")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    prepare(options.data)
    study: dict[str, Any] = {"steps": options.steps, "data": str(options.data)}
    runs = {name: options.out / name for name in MODELS}
    study["training_seconds"] = {
        name: train(name, run, options.data, options.steps, options.ranks)
        for name, run in runs.items()
    }
    study["by_mem_len"] = {
        name: perplexities(name, run, options.data, options.split) for name, run in runs.items()
    }
    print_perplexities(study["by_mem_len"])
    plot(study["by_mem_len"]).savefig(options.out / "mem_len.png", dpi=120)
    split = ("--split", options.split)
    if has_command("recl"):
        study["recl"] = txl_json("recl", *runs.values(), options.data, *split, "--json")
    if has_command("bench", "recall"):
        study["recall"] = {
            name: txl_json("bench", "recall", run, "--json") for name, run in runs.items()
        }
    script = ROOT / "benchmarks" / "what_memory_costs_and_brings.py"
    tables = ("--out", options.out / "tables", "--data", options.data, *split)
    call(sys.executable, script, *tables, *runs.values())
    (options.out / "study.json").write_text(json.dumps(study, indent=1) + "\n")
    say(f"{options.out}/study.json")


def prepare(data: Path) -> None:
    """Prepare the text, once."""
    if (data / "manifest.json").exists():
        return
    collect_sources()
    txl("prepare", SOURCES, "--out", data, "--split", "valid=0.02,test=0.01",
        "--shuffle", 1, "--max-reject-rate", 0.02)  # fmt: skip


def train(name: str, run: Path, data: Path, steps: int, num_ranks: int) -> float:
    """Train one model, or resume its run; the seconds that this took."""
    began = time.monotonic()
    overrides = (
        f"directory={run}",
        f"data.path={data}",
        f"training.num_steps={steps}",
        f"optimizer.warmup_steps={min(50, steps // 2)}",
    )
    config = ROOT / "configs" / "baselines" / f"{name}.yaml"
    txl("train", config, "--on", "processes", "--ranks", num_ranks, *overrides)
    return time.monotonic() - began


def perplexities(name: str, run: Path, data: Path, split: str) -> dict[int, dict[str, Any]]:
    """The result of `txl eval` by `mem_len`. Absolute positions allow no memory."""
    lengths = MEM_LENS[:1] if name == "vanilla" else MEM_LENS
    options = ("--split", split, "--json")
    return {
        length: txl_json("eval", run, data, "--mem-len", length, *options) for length in lengths
    }


def print_perplexities(scores: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> None:
    say("perplexity per byte, by mem_len of the evaluation")
    print(f"{'mem_len':>8}" + "".join(f"{name:>14}" for name in scores))
    for length in MEM_LENS:
        cells = (by_length.get(length) for by_length in scores.values())
        print(f"{length:>8}" + "".join(f"{c['perplexity'] if c else '-':>14.6}" for c in cells))


def plot(scores: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> Figure:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, by_length in scores.items():
        lengths = list(by_length)
        values = [result["perplexity"] for result in by_length.values()]
        if len(lengths) == 1:
            axes.axhline(values[0], linestyle="--", color="grey", label=name)
        else:
            axes.plot(lengths, values, marker="o", label=name)
    axes.set(xlabel="mem_len of the evaluation", ylabel="perplexity per byte")
    axes.legend()
    return figure


def has_command(*words: str) -> bool:
    """Whether this version of txl has a command."""
    command = [sys.executable, "-m", "txl_dist", *words, "--help"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def txl(*words: object, capture: bool = False) -> str:
    """Run one command of txl on the CPU."""
    return call(sys.executable, "-m", "txl_dist", *words, capture=capture)


def txl_json(*words: object) -> Any:
    return json.loads(txl(*words, capture=True))


def call(*words: object, capture: bool = False) -> str:
    """Print and run a command; exits with its code if it fails."""
    command = [str(word) for word in words]
    say(shlex.join(_short(command)))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        command,
        check=False,
        text=True,
        stdout=subprocess.PIPE if capture else None,
        env=environment,
    )
    if ended.returncode:
        sys.exit(ended.returncode)
    return ended.stdout or ""


def _short(command: Sequence[str]) -> list[str]:
    if command[1:3] == ["-m", "txl_dist"]:
        return ["txl", *command[3:]]
    return ["python", *command[1:]]


if __name__ == "__main__":
    main()
