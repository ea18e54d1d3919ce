"""Copy, reverse and retrieval by a key over several segments: what a kind of memory can carry.

    python benchmarks/memory_tasks.py --out runs/memory_tasks.jsonl
    python benchmarks/memory_tasks.py --out runs/memory_tasks.jsonl --table

A sequence is read in `--segments` segments of equal length, one training step per batch of new
sequences, with gradients through all of its segments. Only the answer is scored:

    copy        24 symbols, then the same symbols
    reverse     24 symbols, then the same in reverse order
    retrieval   `--pairs` pairs of key and value, then one of the keys; its value is the answer

The recurrent memory holds one segment per layer, so it reaches 2 segments back. As the tasks of
Bulatov et al. 2022, arXiv:2207.06881, figures 3 and 4. Each run is one line of --out: the share of
correct symbols of new sequences, and CPU-seconds of training. A second call runs what is missing.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from txl_dist import ModelConfig, TransformerXL

TASKS = ("copy", "reverse", "retrieval")
KINDS = ("none", "recurrent", "compressive", "tokens", "recurrent+tokens")
NUM_SYMBOLS, NUM_COPIED = 16, 24
SEPARATOR, PADDING = NUM_SYMBOLS, NUM_SYMBOLS + 1
IGNORED = -1
LANES, SCORED_LANES = 64, 512

# Shapes: B sequences, N tokens of a sequence, T tokens of a segment


def sequences(task: str, num: int, pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens [B, N + 1], and how many of the last ones are the answer, as a mask [B, N]."""
    separator_B1 = torch.full((num, 1), SEPARATOR)
    if task == "retrieval":
        key_BP = torch.rand(num, NUM_SYMBOLS, generator=generator).argsort(1)[:, :pairs]
        value_BP = torch.randint(NUM_SYMBOLS, (num, pairs), generator=generator)
        asked_B1 = torch.randint(pairs, (num, 1), generator=generator)
        pairs_BN = torch.stack([key_BP, value_BP], dim=2).flatten(1)
        question_BN = torch.cat([separator_B1, key_BP.gather(1, asked_B1)], dim=1)
        answer_BN = value_BP.gather(1, asked_B1)
        parts = pairs_BN, question_BN, answer_BN
    else:
        symbol_BN = torch.randint(NUM_SYMBOLS, (num, NUM_COPIED), generator=generator)
        answer_BN = symbol_BN.flip(1) if task == "reverse" else symbol_BN
        parts = symbol_BN, separator_B1, answer_BN
    token_BN = torch.cat(parts, dim=1)
    is_answer_BN = torch.zeros_like(token_BN, dtype=torch.bool)
    is_answer_BN[:, -answer_BN.shape[1] :] = True
    return token_BN, is_answer_BN[:, 1:]


def columns(
    task: str, num: int, segments: int, pairs: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Input, target and age [B, N], padded at the start to whole segments."""
    token_BN, is_answer_BN = sequences(task, num, pairs, generator)
    missing = -(token_BN.shape[1] - 1) % segments
    padding_BN = torch.full((num, missing), PADDING)
    input_BN = torch.cat([padding_BN, token_BN[:, :-1]], dim=1)
    target_BN = torch.cat(
        [torch.full_like(padding_BN, IGNORED), token_BN[:, 1:].where(is_answer_BN, IGNORED)], dim=1
    )
    return input_BN, target_BN, torch.arange(input_BN.shape[1]).expand_as(input_BN)


def train(task: str, kind: str, segments: int, pairs: int, seed: int, steps: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tgt_len = columns(task, 1, segments, pairs, generator)[0].shape[1] // segments
    config = ModelConfig.of_recipe(
        "modern", vocab_size=NUM_SYMBOLS + 2, n_layer=2, d_model=64, n_head=4, d_head=16,
        d_inner=172, memory="recurrent" if kind == "none" else kind,
        mem_len=0 if kind == "none" else tgt_len, compression_rate=2, memory_tokens=10,
    )  # fmt: skip
    model = TransformerXL(config, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    warmup, seconds = 100, 0.0
    curve = []
    for step in range(1, steps + 1):
        batch = columns(task, LANES, segments, pairs, generator)
        start = time.thread_time()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(step / warmup, 2 * (1 - step / (steps + 1)), 1.0)
        nats_BN, _ = model(*batch, model.empty_memory(LANES), None, segments)
        optimizer.zero_grad()
        (nats_BN.sum() / (batch[1] != IGNORED).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds += time.thread_time() - start
        if step % (steps // 8) == 0:
            curve.append((step, round(accuracy(model, task, segments, pairs), 4)))
    name = f"{title(task, pairs)}, {segments} segments, {kind}, seed {seed}"
    print(f"{name}: {curve[-1][1]:.3f}, {seconds:.0f} s")
    return {
        "task": task, "kind": kind, "segments": segments, "pairs": pairs, "seed": seed,
        "steps": steps, "cpu_seconds": round(seconds, 1), "curve": curve,
    }  # fmt: skip


@torch.no_grad()
def accuracy(model: TransformerXL, task: str, segments: int, pairs: int) -> float:
    """Share of the symbols of answers that have the largest logit."""
    batch = columns(task, SCORED_LANES, segments, pairs, torch.Generator().manual_seed(10**6))
    memory, num_right, num_scored = model.empty_memory(SCORED_LANES), 0, 0
    model.eval()
    for input_BT, target_BT, age_BT in zip(*(x.chunk(segments, 1) for x in batch), strict=True):
        hidden_BTD, memory = model.hidden(input_BT, age_BT, memory)
        is_scored_BT = target_BT != IGNORED
        num_right += int((model.logits(hidden_BTD).argmax(-1) == target_BT)[is_scored_BT].sum())
        num_scored += int(is_scored_BT.sum())
    model.train()
    return num_right / num_scored


def title(task: str, pairs: int) -> str:
    return f"retrieval, {pairs} pairs" if task == "retrieval" else task


def print_table(runs: list[dict[str, Any]]) -> None:
    groups: dict[tuple[str, int, int], dict[str, list[dict[str, Any]]]] = defaultdict(dict)
    for run in runs:
        group = groups[title(run["task"], run["pairs"]), run["segments"], run["steps"]]
        group.setdefault(run["kind"], []).append(run)
    print("| task | segments | steps |", " | ".join(KINDS), "|")
    print("|---|--:|--:|" + "--:|" * len(KINDS))
    for (task, segments, steps), by_kind in sorted(groups.items()):
        cells = []
        for kind in KINDS:
            ends = [run["curve"][-1][1] for run in by_kind.get(kind, [])]
            seconds = [run["cpu_seconds"] for run in by_kind.get(kind, [])]
            means = (statistics.mean(x) for x in (ends, seconds)) if ends else None
            cells.append("{:.3f} ({:.0f} s)".format(*means) if means else "-")
        print(f"| {task} | {segments} | {steps} |", " | ".join(cells), "|")
    print("share of correct symbols, mean over seeds (CPU-seconds of training)")


def main() -> None:
    """Train what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file of the results")
    parser.add_argument("--table", action="store_true", help="print the results, train nothing")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--segments", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--pairs", type=int, default=10, help="of retrieval, 1 to 16")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    text = arguments.out.read_text() if arguments.out.exists() else ""
    runs = [json.loads(line) for line in text.splitlines()]
    if arguments.table:
        print_table(runs)
        return
    torch.set_num_threads(1)
    keys = ("task", "kind", "segments", "pairs", "seed", "steps")
    done = {tuple(run[key] for key in keys) for run in runs}
    for seed in arguments.seeds:
        for segments in arguments.segments:
            for task in arguments.tasks:
                for kind in arguments.kinds:
                    run_key = task, kind, segments, arguments.pairs, seed, arguments.steps
                    if run_key not in done:
                        run = train(*run_key)
                        with arguments.out.open("a") as file:
                            file.write(json.dumps(run) + "\n")


if __name__ == "__main__":
    main()
