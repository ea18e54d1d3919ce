"""One ingredient of the modern block at a time: loss at equal tokens and at equal CPU-seconds.

    python benchmarks/compare_blocks.py data/stdlib --out runs/blocks.jsonl
    python benchmarks/compare_blocks.py --out runs/blocks.jsonl --table

DATA is prepared as by `make quickstart`. Every run trains on one thread, in one process, on the
same tokens for all runs of a seed, and scores the same held-out tokens from time to time. CPU
seconds are those of steps alone, without data, evaluation and start. Each run is one line of --out;
a second call runs what is missing. `--table` prints means over seeds, differences from `modern`
with the same seed (the loss varies more between seeds than between runs), and how many steps and
CPU-seconds each run took to the final loss of `paper-adamw`. `--models DIR` keeps the models, for
`txl recl DIR/... DATA`.

`pieces-N` is trained on pieces of N tokens in shuffled order (data.piece_len), by default without
memory, and `gpt` is a GPT without memory in the manner of nanoGPT (rival_gpt.py), at two learning
rates, trained on random windows and scored with at least half a window before each token.

Models are comparable only if each token has equally much text before it. So `--readings` scores the
last model of each run (not of `gpt`) in several ways, with the CPU time of each: in segments of 64
tokens with memories of 0 to 512, and in windows that overlap by half.
"""

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import rival_gpt
import torch
from torch import Tensor

from txl_dist import (
    LanePlan,
    Reading,
    RunConfig,
    SegmentStream,
    TransformerXL,
    evaluate,
    evaluation_spec,
    load_manifest,
    load_run_config,
    open_split,
    open_tokenizer,
    write_exported,
)
from txl_dist.runtime.device import TORCH_DTYPE, autocast
from txl_dist.training.engine.optimizers import create_optimizer
from txl_dist.training.step import lr_at

CONFIGS = Path(__file__).parents[1] / "configs"
REFERENCE = "paper-adamw"
SAME_DATA = ("data.num_lanes=512", "data.lanes_per_step=32", "data.tgt_len=64")
"""As in the modern quickstart."""
ONE_TURN = ("data.lanes_per_step=null",)
"""Every step reads all lanes."""
TWO_SEGMENTS = ("training.backprop_segments=2", "model.memory_tokens=4")
"""The gradient passes through the memory once."""
VARIANTS: dict[str, tuple[str, ...]] = {
    REFERENCE: ("quickstart", *SAME_DATA),
    "paper-as-shipped": ("quickstart",),  # 16 lanes of 128
    "paper-muon": (
        "quickstart", *SAME_DATA, "optimizer.name=muon", "optimizer.lr=8e-3",
        "optimizer.schedule=linear", "optimizer.gradient_clipping=0",
    ),
    "modern": ("modern/quickstart",),
    "32-lanes": ("modern/quickstart", "data.num_lanes=32", *ONE_TURN),
    "128-lanes": ("modern/quickstart", "data.num_lanes=128", "data.tgt_len=16", *ONE_TURN),
    "no-memory": ("modern/quickstart", "model.mem_len=0"),
    "no-memory-32-lanes": (
        "modern/quickstart", "model.mem_len=0", "data.num_lanes=32", *ONE_TURN
    ),
    "memory-64": ("modern/quickstart", "model.mem_len=64"),
    "short-long": ("modern/quickstart", "model.mem_shares=[0.25, 1]"),
    "compressive": ("modern/quickstart", "model.memory=compressive"),
    "compressive-64": (
        "modern/quickstart", "model.memory=compressive", "model.mem_len=64",
        "model.compressed_len=64",
    ),
    "two-segments": ("modern/quickstart", *TWO_SEGMENTS),
    "tokens": ("modern/quickstart", "model.memory=tokens", *TWO_SEGMENTS),
    "recurrent+tokens": ("modern/quickstart", "model.memory=recurrent+tokens", *TWO_SEGMENTS),
    "adamw": ("modern/quickstart", "optimizer.name=adamw", "optimizer.lr=4e-3"),
    "layernorm": ("modern/quickstart", "model.norm=layernorm"),
    "no-qk-norm": ("modern/quickstart", "model.qk_norm=false"),
    "2-heads-of-keys": ("modern/quickstart", "model.n_kv_head=2"),
    "2-heads": ("modern/quickstart", "model.n_head=2", "model.d_head=64"),
    "unscaled": ("modern/quickstart", "model.scale_embedding=false"),
    "relu2": ("modern/quickstart", "model.feed_forward=relu2", "model.d_inner=512"),
    "relu": ("modern/quickstart", "model.feed_forward=relu", "model.d_inner=512"),
    "biases": ("modern/quickstart", "model.biases=true"),
    "tied": ("modern/quickstart", "model.tie_weight=true"),
    "sinusoidal": ("modern/quickstart", "model.distance_encoding=sinusoidal"),
    **{
        f"pieces-{length}": (
            "modern/quickstart", "model.mem_len=0", f"data.piece_len={length}",
            f"data.tgt_len={length}", f"data.lanes_per_step={2048 // length}",
        )
        for length in (64, 128, 256, 512)
    },
    "pieces-1024-memory": ("modern/quickstart", "data.piece_len=1024"),
    "memory-256-segments-128": (
        "modern/quickstart", "model.mem_len=256", "data.tgt_len=128", "data.lanes_per_step=16",
    ),
    "segments-256": ("modern/quickstart", "data.tgt_len=256", "data.lanes_per_step=8"),
    **{
        f"{recipe}-{stream}": (*settings, "precision=bf16", f"training.memory_dtype={dtype}")
        for recipe, settings in {
            "modern": ("modern/quickstart",), "paper": ("quickstart", *SAME_DATA),
        }.items()
        for stream, dtype in (("bf16", "fp32"), ("bf16-stream", "bf16"))
    },
    "rate-12e-3": ("modern/quickstart", "optimizer.lr=12e-3"),
    "cosine": ("modern/quickstart", "optimizer.schedule=cosine"),
}  # fmt: skip
"""Config and overrides of each run: the modern block, and one ingredient changed."""
RIVALS = {"gpt-1e-3": 1e-3, "gpt-3e-3": 3e-3}
"""Learning rates of the GPT."""
SCORED_TOKENS = 200_000
SEGMENT, MEMORIES, OVERLAPPING = 64, (0, 32, 64, 128, 256, 512), (64, 128, 256, 512)
"""Of `--readings`: tokens per segment, memories, and lengths of windows."""


def main() -> None:
    """Train what is missing, or print the table."""
    names = [*VARIANTS, *RIVALS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", type=Path, help="dataset with a split valid")
    parser.add_argument("--out", type=Path, required=True, help="file of the results")
    parser.add_argument("--table", action="store_true", help="print the results, train nothing")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--evaluations", type=int, default=8, help="of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--variants", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--models", metavar="DIR", type=Path, help="keep each model as DIR/DATA-NAME-SEED"
    )
    parser.add_argument("--readings", action="store_true", help="score the last model in all ways")
    arguments = parser.parse_args()
    if arguments.data:
        torch.set_num_threads(1)
        keys = ("data", "name", "seed", "steps")
        done = {tuple(run[key] for key in keys) for run in results(arguments.out)}
        for seed in arguments.seeds:
            for name in arguments.variants:
                if (arguments.data.name, name, seed, arguments.steps) not in done:
                    run = train(name, arguments, seed)
                    with arguments.out.open("a") as file:
                        file.write(json.dumps(run) + "\n")
    if arguments.table:
        print_tables(results(arguments.out))


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train(name: str, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train one run; its result has (step, CPU-seconds, held-out nats) of each evaluation."""
    every = arguments.steps // arguments.evaluations
    data, steps = arguments.data, arguments.steps
    steps_of = gpt_steps if name in RIVALS else transformer_xl_steps
    step, score, model = steps_of(name, data, steps, seed)
    curve, seconds = [], 0.0
    for number in range(1, arguments.steps + 1):
        seconds += step(number)
        if number % every == 0:
            curve.append((number, round(seconds, 2), round(score(), 5)))
            print(f"{name}, seed {seed}: step {number}, {seconds:.0f} CPU-s, {curve[-1][2]:.4f}")
    result = {
        "data": data.name, "name": name, "seed": seed, "steps": steps,
        "parameters": sum(p.numel() for p in model.parameters()), "curve": curve,
    }  # fmt: skip
    if isinstance(model, TransformerXL):
        if arguments.models:
            export(model, data, SEGMENT, arguments.models / f"{data.name}-{name}-{seed}")
        if arguments.readings:
            result["readings"] = readings(model, data)
            print(f"{name}, seed {seed}: {result['readings']}")
    return result


def readings(model: TransformerXL, data: Path) -> dict[str, tuple[float, float]]:
    """Held-out nats of each way to read, and its CPU-microseconds per token."""
    ways: dict[str, Callable[[], float]] = {
        f"{SEGMENT} given {memory}": partial(segment_nats, model, data, SEGMENT, memory)
        for memory in MEMORIES
    }
    for length in OVERLAPPING:
        ways[f"half of {length}"] = partial(held_out_window_nats, model, data, length)
    scores = {}
    for way, score in ways.items():
        start = time.process_time()
        nats = score()
        microseconds = (time.process_time() - start) * 1e6 / SCORED_TOKENS
        scores[way] = (round(nats, 4), round(microseconds, 1))
    return scores


def segment_nats(
    model: TransformerXL, data: Path, tgt_len: int, mem_len: int | None = None
) -> float:
    """Held-out nats in segments, with the memory of training or another."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "model"
        export(model, data, tgt_len, out)
        spec = evaluation_spec(out, data, max_tokens=SCORED_TOKENS, mem_len=mem_len, batch=32)
        return evaluate(spec).sums.nats_per_token


def held_out_window_nats(model: TransformerXL, data: Path, length: int) -> float:
    """Held-out nats in windows of `length` that overlap by half, without memory."""
    _, held_out, _ = texts(data)
    return rival_gpt.held_out_nats(partial(window_nats, model), held_out, length)


def export(model: TransformerXL, data: Path, tgt_len: int, out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    tokenizer = open_tokenizer(data, load_manifest(data))
    write_exported(out, model, tokenizer, Reading(tgt_len=tgt_len, reset="document"))


def window_nats(model: TransformerXL, window_BT: Tensor) -> Tensor:
    """The loss of each token after the first of windows [B, T + 1], without memory, [B, T]."""
    rows, age_T = len(window_BT), torch.arange(window_BT.shape[1] - 1)
    age_BT, memory = age_T.expand(rows, -1), model.empty_memory(rows)
    return model(window_BT[:, :-1], window_BT[:, 1:], age_BT, memory)[0]


Steps = tuple[Callable[[int], float], Callable[[], float], torch.nn.Module]
"""A function that makes step n and returns its CPU-seconds, one that returns the held-out nats, and
the model."""


def transformer_xl_steps(name: str, data: Path, num_steps: int, seed: int) -> Steps:
    config_name, *overrides = VARIANTS[name]
    settings = [f"data.path={data}", f"seed={seed}", f"training.num_steps={num_steps}", *overrides]
    config = load_run_config(CONFIGS / f"{config_name}.yaml", settings)
    manifest = load_manifest(data)
    source = open_split(data, "train", manifest=manifest)
    lanes, tgt_len = config.data.num_lanes, config.data.tgt_len
    plan = LanePlan(num_tokens=source.num_tokens, num_lanes=lanes, tgt_len=tgt_len)
    ordering = config.data.ordering
    stream = SegmentStream(
        source, plan, lanes=range(lanes), reset="document", ordering=ordering, seed=seed
    )
    segments = iter(stream)
    model, optimizer = model_and_optimizer(config, manifest.vocab_size, seed)
    rows, turns = config.data.rows, config.data.num_turns
    dtype = TORCH_DTYPE[config.training.memory_dtype]
    memories = [model.empty_memory(rows, dtype=dtype) for _ in range(turns)]
    clipping, segment = config.optimizer.gradient_clipping, None

    def step(number: int) -> float:
        nonlocal segment
        turn = (number - 1) % turns
        if turn == 0:
            segment = next(segments)
        assert segment is not None
        start = time.thread_time()
        set_rate(optimizer, lr_at(number, config.optimizer, num_steps=num_steps))
        parts = (segment.input, segment.target, segment.age)
        input_BT, target_BT, age_BT = (torch.from_numpy(part[turn::turns]) for part in parts)
        num_segments, memory = config.training.backprop_segments, memories[turn]
        with autocast(config.precision, torch.device("cpu")):
            nats_BT, memories[turn] = model(input_BT, target_BT, age_BT, memory, None, num_segments)
        update(model, optimizer, nats_BT.sum() / (target_BT >= 0).sum(), clipping)
        return time.thread_time() - start

    return step, partial(segment_nats, model, data, config.segment_len), model


def model_and_optimizer(
    config: RunConfig, vocab_size: int | None, seed: int
) -> tuple[TransformerXL, torch.optim.Optimizer]:
    model = TransformerXL(replace(config.model, vocab_size=vocab_size), seed=seed)
    optimizer = create_optimizer(model, config.optimizer)
    for group in optimizer.param_groups:  # as the engine creates the state
        for parameter in group["params"]:
            zeros = {state: torch.zeros_like(parameter) for state in group["states"]}
            optimizer.state[parameter] = {"step": torch.zeros(()), **zeros}
    return model, optimizer


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]


def gpt_steps(name: str, data: Path, num_steps: int, seed: int) -> Steps:
    train_text, held_out, vocab_size = texts(data)
    model = rival_gpt.Gpt(rival_gpt.GptConfig(vocab_size), seed)
    optimizer = rival_gpt.optimizer_of(model, RIVALS[name])
    generator = torch.Generator().manual_seed(seed)
    warmup = 100

    def step(number: int) -> float:
        # As many tokens as a step of the quickstart.
        windows = rival_gpt.random_windows(train_text, 2048 // rival_gpt.WINDOW, generator)
        start = time.thread_time()
        share = (number - warmup) / (num_steps - warmup)
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * max(0.0, share)))
        for group in optimizer.param_groups:
            group["lr"] = RIVALS[name] * (number / warmup if number < warmup else cosine)
        update(model, optimizer, rival_gpt.nats(model, windows).mean(), 1.0)
        return time.thread_time() - start

    nats_of = partial(rival_gpt.nats, model)
    return step, partial(rival_gpt.held_out_nats, nats_of, held_out), model


def update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, clipping: float
) -> None:
    optimizer.zero_grad()
    loss.backward()
    if clipping:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
    optimizer.step()


def texts(data: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """The training text, the scored held-out text, each in its order on disk, and the number of
    ids."""
    manifest = load_manifest(data)
    splits = (open_split(data, split, manifest=manifest) for split in ("train", "valid"))
    train, held_out = (
        np.concatenate([x.read(i, 0, size) for i, size in enumerate(x.block_tokens.tolist())])
        for x in splits
    )
    return train, held_out[: SCORED_TOKENS + 1], manifest.vocab_size


# --- tables ---------------------------------------------------------------------------------------


def print_tables(runs: list[dict[str, Any]]) -> None:
    """One table per dataset and length of the runs."""
    groups = defaultdict(list)
    for run in runs:
        groups[run["data"], run["steps"]].append(run)
    for (data, steps), group in groups.items():
        print(f"\n{data}, {steps} steps, {len({run['seed'] for run in group})} seeds\n")
        print("\n".join(table(group)))
        print("\n".join(["", *readings_table(group)]))


def table(runs: list[dict[str, Any]]) -> Iterator[str]:
    by_name = defaultdict(list)
    for run in runs:
        by_name[run["name"]].append(run)
    reference = by_name.get(REFERENCE)
    goal = statistics.fmean(run["curve"][-1][2] for run in reference) if reference else None
    preset = by_name.get("modern", [])
    yield (
        "| run | parameters | seeds | nats | minus modern | lowest to highest | CPU-s "
        "| nats at the CPU-s of modern, minus its nats "
        f"| steps to {goal or 0:.4f} | share of its CPU-s |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, group in by_name.items():
        final = [run["curve"][-1][2] for run in group]
        seconds = statistics.fmean(run["curve"][-1][1] for run in group)
        values = differences(group, preset, at_its_seconds=False)
        yield (
            f"| {name} | {group[0]['parameters']:,} | {len(group)} | {statistics.fmean(final):.4f} "
            f"| {mean(values)} | {lowest_to_highest(values)} | {seconds:.0f} "
            f"| {mean(differences(group, preset, at_its_seconds=True))} "
            f"| {reached(group, goal, reference)} |"
        )


def readings_table(runs: list[dict[str, Any]]) -> Iterator[str]:
    """Nats of each run by way of reading, and the CPU-microseconds per token, of `--readings`."""
    read = [run for run in runs if "readings" in run]
    ways = list(dict.fromkeys(way for run in read for way in run["readings"]))
    if read:
        yield f"| run | seed | CPU-s | {' | '.join(ways)} |"
        yield "|---" * (len(ways) + 3) + "|"
    for run in read:
        cells = (run["readings"].get(way) for way in ways)
        scores = " | ".join(f"{cell[0]:.3f} ({cell[1]:.0f})" if cell else "-" for cell in cells)
        yield f"| {run['name']} | {run['seed']} | {run['curve'][-1][1]:.0f} | {scores} |"


def differences(
    group: list[dict[str, Any]], preset: list[dict[str, Any]], *, at_its_seconds: bool
) -> list[float]:
    """A run's loss minus that of `modern` with the same seed, so on the same tokens, by seed.

    `at_its_seconds`: of the loss on the curve where the run has used as many CPU-seconds as
    `modern` in all, or at its end if it used fewer.
    """
    finals = {run["seed"]: run["curve"][-1] for run in preset}
    values = []
    for run in group:
        if run["seed"] in finals:
            _, seconds, nats = finals[run["seed"]]
            at = interpolated(run["curve"], seconds) if at_its_seconds else None
            values.append((run["curve"][-1][2] if at is None else at) - nats)
    return values


def mean(values: list[float]) -> str:
    return f"{statistics.fmean(values):+.3f}" if values else "-"


def lowest_to_highest(values: list[float]) -> str:
    return f"{min(values):+.3f} to {max(values):+.3f}" if values else "-"


def interpolated(curve: list[list[float]], seconds: float) -> float | None:
    for (_, s0, n0), (_, s1, n1) in pairwise(curve):
        if s0 <= seconds <= s1:
            return n0 + (n1 - n0) * (seconds - s0) / (s1 - s0)
    return None


def reached(group: list[dict[str, Any]], goal: float | None, reference: Any) -> str:
    """The first evaluated step at the goal, and its share of the reference's CPU-seconds."""
    if goal is None:
        return "- | -"
    whole = statistics.fmean(run["curve"][-1][1] for run in reference)
    firsts = [next(((s, t) for s, t, n in run["curve"] if n <= goal), None) for run in group]
    hits = [first for first in firsts if first]
    if len(hits) < len(firsts):
        return "not reached | -"
    steps, share = max(s for s, _ in hits), statistics.fmean(t for _, t in hits) / whole
    return f"{steps} | {share:.2f}"


if __name__ == "__main__":
    main()
