"""One model in three programs: nats of the same held-out documents.

    python benchmarks/three_programs.py runs/quickstart-1 data/stdlib --split test --documents 20

The run is exported for transformers with its `mem_len` as the window. Then documents of the split
are scored by this program, segment by segment with that memory, by a loop over transformers that
reads each document as a whole, and by lm-evaluation-harness (`--model hf`). The harness does not
score the end of a document, so no sum has it.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import AutoModelForCausalLM

from txl_dist import TransformerXL, find_model, load_manifest, open_split
from txl_dist.convert.hub import write_for_transformers

SEGMENT = 64


def main() -> None:
    """Score the documents and print the three sums."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--split", default="test")
    parser.add_argument("--documents", type=int, default=20)
    arguments = parser.parse_args()
    stored = find_model(arguments.run)
    texts = documents(arguments.data, arguments.split)[: arguments.documents]
    tokenizer = stored.load_with_tokenizer()[1]
    # Reads as a window does, also if the run was trained without `same_length`.
    model = stored.load(replace(stored.config, same_length=True))[0]
    window, tokens = model.config.mem_len, sum(len(ids) - 1 for ids in texts)
    sums = {f"segments of {SEGMENT} with memory": sum(by_segments(model, ids) for ids in texts)}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "model"
        write_for_transformers(out, model, tokenizer, stored.tgt_len, window=window, card=None)
        sums["transformers, whole documents"] = by_documents(out, texts)
        strings = [tokenizer.decode(ids[1:].numpy()) for ids in texts]
        sums["lm-evaluation-harness, model hf"] = by_harness(out, strings)
    print(f"{len(texts)} documents of {arguments.split}, {tokens:,} tokens, window {window}")
    for name, nats in sums.items():
        print(f"{name:32} {nats:14.4f} nats, {nats / tokens:.7f} per token")


def documents(data: Path, split: str) -> list[Tensor]:
    """Token ids of each document, after the token that opens it."""
    source = open_split(data, split, manifest=load_manifest(data))
    found: list[Tensor] = []
    for block, size in enumerate(source.block_tokens.tolist()):
        ids = source.read(block, 0, size).astype(np.int64)
        starts = np.asarray(source.document_starts(block))
        found += [torch.from_numpy(part) for part in np.split(ids, starts[starts > 0])]
    return found


@torch.no_grad()
def by_segments(model: TransformerXL, ids: Tensor) -> float:
    """The nats of one document, with a memory that begins empty."""
    memory, total, age = model.empty_memory(1), 0.0, torch.arange(len(ids))
    for start in range(0, len(ids) - 1, SEGMENT):
        stop = min(start + SEGMENT, len(ids) - 1)
        inputs, targets = ids[None, start:stop], ids[None, start + 1 : stop + 1]
        nats_BT, memory = model(inputs, targets, age[None, start:stop], memory)
        total += float(nats_BT.double().sum())
    return total


@torch.no_grad()
def by_documents(directory: Path, texts: list[Tensor]) -> float:
    """The same in transformers, in one pass."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    total = 0.0
    for ids in texts:
        logits = model(ids[None, :-1]).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
    return total


def by_harness(directory: Path, strings: list[str]) -> float:
    """The same by its rolling log-likelihood."""
    harness = HFLM(pretrained=str(directory), device="cpu", batch_size=1, dtype="float32")
    requests = [Instance("loglikelihood_rolling", {}, (text,), idx=0) for text in strings]
    return -sum(harness.loglikelihood_rolling(requests))


if __name__ == "__main__":
    main()
