"""Benefit of the memory: one small model with memory, without, and a vanilla Transformer.

    python benchmarks/memory_study.py --out runs/memory-study
    python benchmarks/memory_study.py --out runs/memory-study --steps 20     # only to try it

The text is the source code of the Python standard library, in bytes. The three configs of
configs/baselines are trained on the same tokens with the same seed, and then compared:

    perplexity by mem_len                  txl eval --mem-len
    relative effective context length      txl recl
    how far a copy is found                txl bench recall
    mean loss by position in the segment   here, with the memory of training and with none

Every command is printed before it runs. About half an hour on two CPU cores with the default
number of steps. A stopped study continues with the same command; a finished run is not trained
again. --out gets study.json, mem_len.png and the runs.
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from quickstart import SOURCES, collect_sources, say, txl

from txl_dist.evaluation.spec import evaluation_spec, plan_evaluation

ROOT = Path(__file__).parents[1]
MODELS = ("with-memory", "no-memory", "vanilla")
MEM_LENS = (0, 32, 64, 128, 256, 512)
FIRST_TOKENS = (1, 2, 4, 8, 16, 32, 64)
MAX_TOKENS = 50_000
"""Of the split, for the loss by position."""


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
    study["recl"] = txl_json("recl", *runs.values(), options.data, *split, "--json")
    study["recall"] = {
        name: txl_json("bench", "recall", run, "--json") for name, run in runs.items()
    }
    study["by_position"] = [
        row for run in runs.values() for row in losses_by_position(run, options.data, options.split)
    ]
    print_losses(study["by_position"])
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


def txl_json(*words: object) -> Any:
    return json.loads(txl(*words, capture=True))


# --- context fragmentation ------------------------------------------------------------------------


def losses_by_position(run: Path, data: Path, split: str) -> list[dict[str, Any]]:
    """Mean nats of the first tokens of a segment, with the memory of training and with none."""
    trained = _nats_by_position(run, data, split, None)
    rows = [trained]
    if trained["mem_len"]:
        rows.append(_nats_by_position(run, data, split, 0))
    for row in rows:
        nats_T = row.pop("nats_by_position")
        row["all"] = sum(nats_T) / len(nats_T)
        for count in FIRST_TOKENS:
            first = count // 2  # the columns are the targets 1, 2, 3-4, 5-8, ...
            name = f"{first + 1}-{count}" if count > 2 else str(count)
            row[name] = sum(nats_T[first:count]) / (count - first)
    return rows


def _nats_by_position(run: Path, data: Path, split: str, mem_len: int | None) -> dict[str, Any]:
    spec = evaluation_spec(run, data, split=split, mem_len=mem_len, batch=8, max_tokens=MAX_TOKENS)
    scorer = spec.open()
    model, tgt_len = scorer.model, spec.settings.tgt_len
    nats_T, count_T = torch.zeros(2, tgt_len, dtype=torch.float64)
    for group in scorer.groups(plan_evaluation(scorer.source, spec.settings, model.config)):
        cache = model.inference_state(len(group))
        for segment in scorer.segments(group):
            input_BT, target_BT, age_BT = segment[:3]
            with torch.no_grad():
                nats_BT, cache = model(input_BT, target_BT, age_BT, cache)
            nats_T += nats_BT.double().sum(0).cpu()
            count_T += (target_BT >= 0).sum(0).double()
    return {
        "model": run.name,
        "mem_len": spec.settings.mem_len,
        "nats_by_position": (nats_T / count_T.clamp(min=1)).tolist(),
    }


def print_losses(rows: list[dict[str, Any]]) -> None:
    say("mean nats by position in the segment")
    print("".join(f"{name:>12}" for name in rows[0]))
    for row in rows:
        cells = (f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.values())
        print("".join(f"{cell:>12}" for cell in cells))


if __name__ == "__main__":
    main()
