"""What the memory costs and brings: tables of context, cost and loss at the start of a segment.

    python benchmarks/what_memory_costs_and_brings.py --out runs/memory-tables
    python benchmarks/what_memory_costs_and_brings.py --out runs/memory-tables
        --data data/baselines runs/baselines/with-memory runs/baselines/no-memory

1. Effective context: how far back the last token of a segment reaches, by layers and memory.
   Computed, and for small models with random weights measured: the oldest input token whose change
   changes the output.
2. Cost per token by attention length: with a KV cache (state reuse), with a sliding window that is
   read again for every token (the paper's vanilla evaluation, section 3.1), and with one pass of
   full attention over the whole text. FLOPs by txl_dist/model/flops.py, and measured times and
   memory of a model of four layers.
3. Context fragmentation, for given checkpoints: the mean loss of the first tokens of a segment,
   with the memory of training and with none.

Trains nothing; about five minutes on two CPU cores. Prints the tables and writes tables.json and
PNG files to --out.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from figures import peak_mib
from matplotlib.figure import Figure

from txl_dist.analysis.eval_speed import time_rounds
from txl_dist.evaluation.spec import evaluation_spec, plan_evaluation
from txl_dist.model.config import ModelConfig
from txl_dist.model.flops import forward_flops, inference_flops
from txl_dist.model.transformer_xl import TransformerXL

# Shapes: B lanes, T segment tokens, N tokens of a text

LAYERS, MEMORIES = (1, 2, 4, 8, 12, 16), (0, 64, 128, 640, 1600)
CONTEXT_TGT_LEN = 64
MEASURED = [(1, 4, 0), (1, 4, 6), (2, 4, 4), (3, 4, 6), (3, 5, 7), (4, 4, 8)]
"""(layers, tgt_len, mem_len) of the models whose reach is measured."""
ATTENTION_LENGTHS = (128, 256, 512, 1024, 2048)
COST_TGT_LEN = 64
SMALL = ModelConfig(
    vocab_size=257, n_layer=4, d_model=128, n_head=4, d_head=32, d_inner=512, mem_len=0
)
WAYS = ("reuse", "window", "full")
FIRST_TOKENS = (1, 2, 4, 8, 16, 32, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", nargs="*", type=Path, help="runs, checkpoints or exports")
    parser.add_argument("--data", type=Path, help="dataset of the checkpoints")
    parser.add_argument("--split", default="valid")
    parser.add_argument("--max-tokens", type=int, default=50_000, help="of the split")
    parser.add_argument("--rounds", type=int, default=5, help="of the timing")
    parser.add_argument("--lengths", type=int, nargs="+", default=ATTENTION_LENGTHS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.checkpoints and options.data is None:
        parser.error("checkpoints need --data")
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    tables: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "context": effective_context(),
        "measured_context": measured_context(),
        "cost": cost_per_token(options.lengths, rounds=options.rounds),
    }
    plot_cost(tables["cost"]).savefig(options.out / "cost.png", dpi=120)
    if options.checkpoints:
        tables["fragmentation"] = [
            row
            for checkpoint in options.checkpoints
            for row in fragmentation(
                checkpoint, options.data, options.split, max_tokens=options.max_tokens
            )
        ]
        plot_fragmentation(tables["fragmentation"]).savefig(
            options.out / "fragmentation.png", dpi=120
        )
    tables["seconds"] = time.monotonic() - began
    (options.out / "tables.json").write_text(json.dumps(tables, indent=1) + "\n")
    print(f"\n{options.out}/tables.json, {tables['seconds']:.0f} s")


def print_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print rows with the same keys."""
    cells = [list(rows[0]), *([text(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


# --- 1. effective context -------------------------------------------------------------------------


def tokens_in_reach(*, n_layer: int, tgt_len: int, mem_len: int, position: int) -> int:
    """Input tokens that the output at `position` depends on, itself included.

    A layer sees from `mem_len` before the start of the position's segment, and what it sees there
    has the reach of the layer below (arXiv:1901.02860, section 3.2: O(N * L)).
    """
    oldest = position
    for _ in range(n_layer):
        oldest = max(0, oldest // tgt_len * tgt_len - mem_len)
    return position + 1 - oldest


def effective_context() -> list[dict[str, Any]]:
    """One row per number of layers, one column per memory length, for an endless text."""
    rows = []
    for n_layer in LAYERS:
        row: dict[str, Any] = {"layers": n_layer}
        for mem_len in MEMORIES:
            position = CONTEXT_TGT_LEN * (n_layer * (mem_len // CONTEXT_TGT_LEN + 2)) - 1
            row[f"mem_len {mem_len}"] = tokens_in_reach(
                n_layer=n_layer, tgt_len=CONTEXT_TGT_LEN, mem_len=mem_len, position=position
            )
        rows.append(row)
    print_table(
        f"1. Tokens that the last token of a segment of {CONTEXT_TGT_LEN} depends on. A vanilla "
        "model is the column mem_len 0.\n   A sliding window sees exactly its length, for any "
        "number of layers.",
        rows,
    )
    return rows


def measured_context() -> list[dict[str, Any]]:
    """The formula, and the oldest token whose change changes the output of a random model."""
    rows = []
    for n_layer, tgt_len, mem_len in MEASURED:
        num_tokens = tgt_len * (n_layer * (mem_len // tgt_len + 2) + 1)
        computed = tokens_in_reach(
            n_layer=n_layer, tgt_len=tgt_len, mem_len=mem_len, position=num_tokens - 1
        )
        rows.append(
            {
                "layers": n_layer,
                "tgt_len": tgt_len,
                "mem_len": mem_len,
                "computed": computed,
                "measured": _measure_reach(n_layer, tgt_len, mem_len, num_tokens),
            }
        )
    print_table("   Measured: tokens whose change changes the output at the last position", rows)
    return rows


def _measure_reach(n_layer: int, tgt_len: int, mem_len: int, num_tokens: int) -> int:
    config = replace(SMALL, vocab_size=11, n_layer=n_layer, d_model=16, n_head=2, d_head=8)
    model = TransformerXL(replace(config, d_inner=24, mem_len=mem_len, init_std=0.3), seed=1)
    model.double()
    generator = torch.Generator().manual_seed(1)
    tokens_N = torch.randint(11, (num_tokens,), generator=generator)
    # Row b has another token at position b; the last row is unchanged.
    rows_BN = tokens_N.repeat(num_tokens + 1, 1)
    rows_BN[range(num_tokens), range(num_tokens)] = (tokens_N + 1) % 11
    age_BN = torch.arange(num_tokens).expand(num_tokens + 1, num_tokens)
    cache = model.inference_state(num_tokens + 1)
    with torch.no_grad():
        for start in range(0, num_tokens, tgt_len):
            segment = slice(start, start + tgt_len)
            hidden_BTD, cache = model.hidden(rows_BN[:, segment], age_BN[:, segment], cache)
    changes = (hidden_BTD[:-1, -1] != hidden_BTD[-1, -1]).any(-1)
    return num_tokens - int(changes.nonzero()[0])


# --- 2. cost --------------------------------------------------------------------------------------


def cost_per_token(lengths: Sequence[int], *, rounds: int) -> list[dict[str, Any]]:
    """One row per attention length: FLOPs, milliseconds and memory of each way."""
    rows = []
    for length in lengths:
        flops = {
            "reuse": inference_flops(_reusing(length), num_lanes=1, tgt_len=COST_TGT_LEN)
            / COST_TGT_LEN,
            "window": float(forward_flops(SMALL, num_lanes=1, tgt_len=length)),
            "full": forward_flops(SMALL, num_lanes=1, tgt_len=length) / length,
        }
        reads = {name: build_read(name, length) for name in WAYS}
        times = time_rounds(reads, rounds=rounds, warm_up_rounds=2)
        tokens = {"reuse": COST_TGT_LEN, "window": 1, "full": length}
        milliseconds = {name: 1e3 * times[name] / tokens[name] for name in WAYS}
        rows.append(
            {
                "attention": length,
                **{f"{name} MFLOP": flops[name] / 1e6 for name in WAYS},
                "window / reuse": flops["window"] / flops["reuse"],
                **{f"{name} ms": milliseconds[name] for name in WAYS},
                "measured ratio": milliseconds["window"] / milliseconds["reuse"],
                **{f"{name} MiB": peak_mib(build_read, name, length) for name in WAYS},
            }
        )
    print_table(
        f"2. Cost per token of a model of {SMALL.n_layer} layers, d_model {SMALL.d_model}, by "
        f"attention length. reuse: KV cache, segments of {COST_TGT_LEN}; window: the whole\n   "
        "window again for each token; full: one pass over a text of that length. MiB: peak memory "
        "of a call without the weights, measured in a separate process.\n   For a longer text "
        "the costs of reuse and window stay as they are; that of full is the row of its length.",
        rows,
    )
    return rows


def _reusing(length: int) -> ModelConfig:
    return replace(SMALL, mem_len=length - COST_TGT_LEN)


def build_read(way: str, length: int) -> Callable[[], None]:
    """A function that reads one segment (`reuse`), window, or text (`full`)."""
    model = TransformerXL(_reusing(length) if way == "reuse" else SMALL, seed=1)
    tokens_BN = torch.randint(257, (1, length), generator=torch.Generator().manual_seed(1))
    age_BN = torch.arange(length)[None]
    segment_BT, segment_age_BT = tokens_BN[:, :COST_TGT_LEN], age_BN[:, -COST_TGT_LEN:]
    cache = model.inference_state(1)

    @torch.no_grad()
    def read() -> None:
        if way == "reuse":
            model(segment_BT, segment_BT, segment_age_BT, cache)
        elif way == "full":
            model(tokens_BN, tokens_BN, age_BN, model.inference_state(1))
        else:  # only the last token is scored, but all have to be computed
            hidden_BTD, _ = model.hidden(tokens_BN, age_BN, model.inference_state(1))
            model.softmax(hidden_BTD[:, -1:], tokens_BN[:, -1:], model.table)

    return read


def plot_cost(rows: Sequence[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(14, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    lengths = [row["attention"] for row in rows]
    units = {
        "MFLOP": "MFLOP per token",
        "ms": "ms per token (measured)",
        "MiB": "peak MiB (measured)",
    }
    for axes, (unit, label) in zip(panels, units.items(), strict=True):
        for name in ("window", "full", "reuse"):
            axes.plot(lengths, [row[f"{name} {unit}"] for row in rows], marker="o", label=name)
        axes.set(xscale="log", yscale="log", xlabel="attention length in tokens", ylabel=label)
        axes.set_xticks(lengths, labels=map(str, lengths))
        axes.minorticks_off()
        axes.legend()
    return figure


# --- 3. context fragmentation ---------------------------------------------------------------------


def fragmentation(
    checkpoint: Path, data: Path, split: str, *, max_tokens: int
) -> list[dict[str, Any]]:
    """Mean nats of the first tokens of a segment; a row per memory length."""
    rows = []
    trained = _nats_by_position(checkpoint, data, split, None, max_tokens=max_tokens)
    tables = [trained]
    if trained["mem_len"]:
        tables.append(_nats_by_position(checkpoint, data, split, 0, max_tokens=max_tokens))
    for table in tables:
        nats_T = table.pop("nats_by_position")
        row = {**table, "all": sum(nats_T) / len(nats_T)}
        for count in FIRST_TOKENS:
            if count <= len(nats_T):
                first = count // 2  # the columns are the targets 1, 2, 3-4, 5-8, ...
                row[f"{first + 1}-{count}" if count > 2 else str(count)] = sum(
                    nats_T[first:count]
                ) / (count - first)
        rows.append(row)
    print_table(
        f"3. {checkpoint}: mean nats by position in the segment, split {split} of {data}", rows
    )
    return rows


def _nats_by_position(
    checkpoint: Path, data: Path, split: str, mem_len: int | None, *, max_tokens: int
) -> dict[str, Any]:
    spec = evaluation_spec(
        checkpoint,
        data,
        split=split,
        tgt_len=None,
        mem_len=mem_len,
        batch=8,
        max_tokens=max_tokens,
    )
    scorer = spec.open()
    model = scorer.model
    chunks = plan_evaluation(scorer.source, spec.settings, model.config)
    nats_T = torch.zeros(spec.settings.tgt_len, dtype=torch.float64)
    count_T = torch.zeros(spec.settings.tgt_len, dtype=torch.float64)
    for group in scorer.groups(chunks):
        cache = model.inference_state(len(group))
        for segment in scorer.segments(group):
            input_BT, target_BT, age_BT = segment[:3]
            with torch.no_grad():
                nats_BT, cache = model(input_BT, target_BT, age_BT, cache)
            nats_T += nats_BT.double().sum(0).cpu()
            count_T += (target_BT >= 0).sum(0).double()
    settings = asdict(spec.settings)
    return {
        "model": checkpoint.name,
        "tgt_len": settings["tgt_len"],
        "mem_len": settings["mem_len"],
        "nats_by_position": (nats_T / count_T.clamp(min=1)).tolist(),
    }


def plot_fragmentation(rows: Sequence[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        columns = [key for key in row if key[0].isdigit()]
        label = f"{row['model']}, mem_len {row['mem_len']}"
        axes.plot(columns, [row[key] for key in columns], marker="o", label=label)
    axes.set(xlabel="position of the target in the segment", ylabel="mean nats per token")
    axes.legend()
    return figure


if __name__ == "__main__":
    main()
