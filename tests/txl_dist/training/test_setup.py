"""Prepare, train, evaluate and generate with every kind of tokenizer, through the commands."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from data_pipeline.shards.manifest import load_manifest, open_tokenizer
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.streams.segments import read_range
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import tiny_spec, train
from txl_dist.cli.app import app

LINES = "the grey sea ; 潮 は 満ちる\n\nit isn't far , don't wait <unk> <eos>\n"
KINDS = {
    "char": ["--tokenizer", "char"],
    "bpe": ["--tokenizer", "bpe", "--vocab-size", 300],
    "word": ["--tokenizer", "word", "--vocab-size", 2000],
    "wt103": ["--tokenizer", "word", "--recipe", "wt103"],
    "lm1b": ["--tokenizer", "word", "--recipe", "lm1b", "--vocab-size", 16],
    "text8": ["--tokenizer", "char", "--recipe", "text8"],
    "enwik8": ["--tokenizer", "byte", "--recipe", "enwik8"],
}
OWN_SPLITS = ("text8", "enwik8")
HAS_UNKNOWN = ("char", "word", "wt103", "lm1b")
"""Words: the text has `<unk>`. Characters: one is only in valid."""


def run_json(*words: object) -> dict:
    result = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(9):
        text = LINES * (6 + number) + f"file {number}\n"
        (folder / f"{number}.txt").write_text(text, "utf-8")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_corpus_of_any_tokens_trains_and_is_scored(
    kind: str, corpus: Path, tmp_path: Path, ranks: RankGroups
) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    split = ["--split", "valid=0.3"]
    if kind in OWN_SPLITS:  # they take one document
        corpus, split = corpus / "8.txt", []
        corpus.write_text(corpus.read_text("utf-8") * 6, "utf-8")
    command = ["prepare", corpus, "--out", data, *split, *KINDS[kind]]
    prepared = run_json(*command)
    assert run_json(*command)["status"] == "already complete"
    assert run_json("data", "verify", data)["ok"]
    assert run_json("data", "inspect", data)["documents"]
    manifest = load_manifest(data)
    tokenizer = open_tokenizer(data, manifest)
    assert prepared["vocab_size"] == tokenizer.vocab_size
    max_tokens = "null" if kind in ("bpe", "word") else 50
    spec = tiny_spec(
        *(data, run, "training.num_steps=2", "optimizer.warmup_steps=1"),
        f"evaluation.max_tokens={max_tokens}",
    )
    assert ranks(1).run(train, spec) == [0]
    step = json.loads((run / "evaluations" / "step-00000002.json").read_text())
    source, num_bytes = open_split(data, "valid", manifest=manifest), tokenizer.token_bytes()
    if max_tokens == "null":
        known = 0 if kind == "word" else manifest.splits["valid"].text_bytes
        assert step["bytes_scored"] == known
    else:
        ids, _ = read_range(source, 1, step["tokens_scored"] + 1)
        assert step["bytes_scored"] == max(0, num_bytes[ids].sum())
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    bits = ["bits_per_byte" in line for line in lines if "loss" in line]
    assert bits == [num_bytes.any()] * len(bits) != []

    scored = run_json("eval", run, data, "--split", "valid")
    ids, _ = read_range(source, 1, scored["tokens_scored"] + 1)
    unknown = np.count_nonzero(ids == tokenizer.unknown_id)
    assert bool(unknown) == (kind in HAS_UNKNOWN)
    assert scored.get("unknown_targets", 0) == unknown
    if unknown:
        assert (scored["bits_per_byte"], scored["bytes_scored"]) == (None, None)
    else:
        assert scored["bytes_scored"] == num_bytes[ids].sum()
        assert math.isclose(
            scored["bits_per_byte"], scored["nats"] / math.log(2) / scored["bytes_scored"]
        )
    written = run_json("generate", run, "--prompt", "the grey", "--max-tokens", 5)
    assert isinstance(written["text"], str)
