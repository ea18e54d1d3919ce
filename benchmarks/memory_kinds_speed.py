"""What each kind of memory costs: time against that of the recurrent memory, and against its FLOPs.

    python benchmarks/memory_kinds_speed.py --rounds 10

A training step (forward, backward, AdamW) of two segments with gradients through the memory between
them, and one segment token by token as `txl generate` reads it. Every kind alternates with the
recurrent memory on one thread; CPU time counts. Random weights, a full memory, the block of the
recipe `modern`. The share is the ratio of FLOPs divided by the ratio of times: 1 if a kind takes
exactly the time that its matrix products would predict.
"""

import argparse
import time
from typing import Any

import torch
from model_speed import Work
from training_step import OLD, zipf_segment

from txl_dist import ModelConfig, TransformerXL
from txl_dist.analysis.eval_speed import time_rounds
from txl_dist.model.flops import inference_flops, training_flops
from txl_dist.model.token_step import TokenStep
from txl_dist.runtime.device import torch_threads
from txl_dist.runtime.process import keep_freed_memory

NUM_LANES, TGT_LEN, MEM_LEN, NUM_SEGMENTS, MEMORY_TOKENS = 4, 128, 128, 2, 8
NUM_GENERATED = 16
MIN_SHARE = 0.8
KINDS: dict[str, dict[str, Any]] = {
    "recurrent": {},
    "none": {"memory": "none"},
    "compressive": {"memory": "compressive"},
    "tokens": {"memory": "tokens", "memory_tokens": MEMORY_TOKENS},
    "recurrent+tokens": {"memory": "recurrent+tokens", "memory_tokens": MEMORY_TOKENS},
}


def main() -> None:
    """Print one table for training and one for generation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    keep_freed_memory()
    with torch_threads(1):
        for title, work_of in (
            (f"training step, {NUM_SEGMENTS} segments of {TGT_LEN // NUM_SEGMENTS}", training),
            (f"generation of {NUM_GENERATED} tokens, one at a time", generation),
        ):
            print(f"\n{title}; {NUM_LANES} lanes, memory {MEM_LEN}, {MEMORY_TOKENS} memory tokens")
            print("| kind | ms | time ratio | FLOP ratio | share of it | limit |")
            print("|---|--:|--:|--:|--:|--:|")
            works = {name: work_of(config(**options)) for name, options in KINDS.items()}
            for row in rows(works, arguments.rounds):
                print(row, flush=True)


def config(**options: Any) -> ModelConfig:
    """4 layers of the recipe `modern`, of width 512."""
    sizes = {
        "vocab_size": 257, "n_layer": 4, "d_model": 512, "n_head": 8, "d_head": 64,
        "d_inner": 1366, "mem_len": MEM_LEN,
    }  # fmt: skip
    return ModelConfig.of_recipe("modern", **{**sizes, **options})


def rows(works: dict[str, Work], rounds: int) -> list[str]:
    runs = {name: work.run for name, work in works.items()}
    times = time_rounds(runs, rounds=rounds, warm_up_rounds=1, clock=time.thread_time)
    base, lines = works["recurrent"], []
    for name, work in works.items():
        ratio = times[name] / times["recurrent"]
        flops = work.flops / base.flops
        share = flops / ratio
        verdict = "holds" if share >= MIN_SHARE else "MISSED"
        limit = "-" if name == "recurrent" else f">= {MIN_SHARE} {verdict}"
        lines.append(
            f"| {name} | {times[name] * 1e3:.1f} | {ratio:.2f} | {flops:.2f} | {share:.2f} "
            f"| {limit} |"
        )
    return lines


def training(model_config: ModelConfig) -> Work:
    model = TransformerXL(model_config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    input_BT, target_BT = zipf_segment(model_config.num_ids, (NUM_LANES, TGT_LEN))
    age_BT = OLD + torch.arange(TGT_LEN, dtype=torch.int32).expand(NUM_LANES, TGT_LEN)
    memory = model.empty_memory(NUM_LANES)

    def step() -> None:
        nonlocal memory
        nats_BT, memory = model(input_BT, target_BT, age_BT, memory, None, NUM_SEGMENTS)
        nats_BT.mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    flops = training_flops(
        model_config, num_lanes=NUM_LANES, tgt_len=TGT_LEN, num_segments=NUM_SEGMENTS
    )
    return Work(step, flops)


def generation(model_config: ModelConfig) -> Work:
    """A segment, token by token, as txl_dist/generation/decoder.py reads it: in a `TokenStep` with
    cached keys, or as segments of one token. A kind that adds tokens to its segments reads the
    incomplete segment again for every token."""
    model = TransformerXL(model_config)
    reads_again = model_config.memory_facts.adds_tokens
    input_BT, _ = zipf_segment(model_config.num_ids, (NUM_LANES, NUM_GENERATED))
    age_BT = OLD + torch.arange(NUM_GENERATED, dtype=torch.int32).expand(NUM_LANES, NUM_GENERATED)
    state = model.inference_state(NUM_LANES)
    with torch.no_grad():
        # Fills the cache.
        model.hidden(input_BT, age_BT, state)
        step = TokenStep(model, state) if TokenStep.supports(model, state) else None

    @torch.no_grad()
    def read() -> None:
        nonlocal state
        before = state
        for stop in range(1, NUM_GENERATED + 1):
            if step is not None:
                model.logits(step(input_BT[:, stop - 1], [OLD] * NUM_LANES))
                continue
            start = 0 if reads_again else stop - 1
            given = before if reads_again else state
            hidden_BTD, state = model.hidden(input_BT[:, start:stop], age_BT[:, start:stop], given)
            model.logits(hidden_BTD[:, -1])

    lengths = range(1, NUM_GENERATED + 1) if reads_again else [1] * NUM_GENERATED
    flops = sum(inference_flops(model_config, num_lanes=NUM_LANES, tgt_len=n) for n in lengths)
    return Work(read, flops)


if __name__ == "__main__":
    main()
