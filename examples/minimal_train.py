"""A Transformer-XL trained in one process: dataset, lanes, memory, optimizer, evaluation, saving.

    txl prepare BOOKS/*.txt --out data/books --split valid=0.05
    python examples/minimal_train.py data/books --out models/books
    txl generate models/books --prompt 'Call me'

Only names of `txl_dist.__all__` are used. `txl train` makes the same steps on many ranks, with
DeepSpeed, checkpoints, restarts and tracking.
"""

import argparse
import time
from pathlib import Path

import torch

from txl_dist import (
    LanePlan,
    ModelConfig,
    Reading,
    SegmentStream,
    TransformerXL,
    evaluate,
    evaluation_spec,
    load_manifest,
    open_split,
    open_tokenizer,
    write_exported,
)

# Shapes: B lanes, T segment tokens

NUM_LANES = 16
"""Rows of the batch. Each is one contiguous stream of tokens."""
TGT_LEN = 128
"""Tokens that one step reads from each lane."""
MODEL = {
    "n_layer": 4, "d_model": 128, "n_head": 4, "d_head": 32, "d_inner": 512,
    "mem_len": 128,  # tokens before the segment that every layer can attend to
}  # fmt: skip
LR, WARMUP_STEPS, CLIPPING = 1e-3, 100, 0.25


def main() -> None:
    """Read the command line, train, and score the split `valid`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="directory that txl prepare wrote")
    parser.add_argument("--out", type=Path, required=True, help="new directory for the model")
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    train(arguments.data, arguments.out, num_steps=arguments.steps)
    result = evaluate(evaluation_spec(arguments.out, arguments.data, split="valid"))
    sums = result.sums
    print(f"valid: loss {sums.nats_per_token:.4f}, perplexity {sums.perplexity:.2f}")
    print(f"  of {sums.num_tokens:,} targets, each scored once with its whole context")


def train(data: Path, out: Path, *, num_steps: int) -> None:
    """Train from random weights, and write the model with its tokenizer to `out`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    # The dataset: shards with checksums, which the manifest lists, and the tokenizer.
    manifest = load_manifest(data)
    source = open_split(data, "train", manifest=manifest)

    # The lanes: lane b reads tokens [b Q, (b + 1) Q) of an epoch's order, without a gap. The first
    # input of a segment is therefore the last target of the segment before it.
    plan = LanePlan(num_tokens=source.num_tokens, num_lanes=NUM_LANES, tgt_len=TGT_LEN)
    segments = SegmentStream(source, plan, lanes=range(NUM_LANES), reset="document", seed=0)

    model = TransformerXL(ModelConfig(vocab_size=manifest.vocab_size, **MODEL), seed=0).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)

    # The memory: the layers' inputs of the last `mem_len` tokens of every lane, without gradient.
    # It is an argument and a result of every segment, and the only state besides the weights.
    memory = model.empty_memory(NUM_LANES)

    start = time.perf_counter()
    for step, segment in zip(range(1, num_steps + 1), segments, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, step / WARMUP_STEPS)

        # `age` says how many tokens back a token may look: never before the start of its document.
        input_BT = torch.from_numpy(segment.input).to(device)
        target_BT = torch.from_numpy(segment.target)  # the softmax reads its clusters on the host
        age_BT = torch.from_numpy(segment.age).to(device)
        nats_BT, memory = model(input_BT, target_BT, age_BT, memory)

        # Targets at the end of a lane's part of an epoch are -1: they have no loss.
        loss = nats_BT.sum() / (target_BT >= 0).sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"step {step}: the gradient norm is {norm}; lower LR")
        optimizer.step()

        if step % 50 == 0 or step in (1, num_steps):
            rate = step * NUM_LANES * TGT_LEN / (time.perf_counter() - start)
            print(f"step {step} | loss {loss:.4f} | tok/s {rate:,.0f}", flush=True)
    segments.close()

    tokenizer = open_tokenizer(data, manifest)
    write_exported(out, model, tokenizer, Reading(tgt_len=TGT_LEN, reset="document"))
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
