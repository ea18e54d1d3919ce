"""`txl reproduce`: from files as they are published to a score, by the documented commands."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from data_pipeline.shards.manifest import load_manifest, open_tokenizer
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.tokenizers.recipes import RECIPES
from tests.support.commands import run_txl, txl
from tests.support.wikitext_layouts import SIZES, wikitext, write_parquet, write_tokens
from txl_dist.cli.app import app
from txl_dist.cli.published_files import experiments
from txl_dist.errors import ConfigError, DataError

SMALL = (
    "model.n_layer=1",
    "model.d_model=8",
    "model.n_head=2",
    "model.d_head=4",
    "model.d_inner=16",
    "model.mem_len=5",
    "data.num_lanes=2",
    "data.tgt_len=7",
    "training.num_steps=3",
    "optimizer.warmup_steps=0",
    "evaluation.max_tokens=50",
    "tracking.enabled=false",
)


def write_enwik8(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "enwik8").write_text(wikitext(2000))


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["enwik9"], ConfigError, "expected one of wt103-base"),
        (["enwik8-base"], ConfigError, "--data DIR. Source: mattmahoney.net"),
        (["wt103-base", "--data", "."], DataError, "wiki.train.tokens, wiki.valid.tokens, "),
    ],
)
def test_what_is_missing_is_named_before_anything_starts(
    words: list[str],
    error: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["reproduce", *words])
    assert isinstance(result.exception, error)
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def run_experiment(name: str, data: Path, out: Path, *settings: str) -> dict[str, Any]:
    """The result of a shrunken experiment, which is the same when it is run again."""
    words = ("reproduce", name, *SMALL, *settings, "--data", data, "--out", out)
    ended = txl(*words, "--on", "processes", "--json", timeout_seconds=300)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result == json.loads((out / "reproduction.json").read_text())
    assert result["published"] == experiments()[name].published
    evaluated = result["evaluation"]
    assert evaluated["split"] == "test"
    assert evaluated["same_length"] is True
    assert evaluated["mem_len"] == experiments()[name].lengths["mem_len"]
    manifest = load_manifest(out / "data")
    assert evaluated["tokens_scored"] == manifest.splits["test"].tokens - 1
    assert evaluated["data_sha256"] == manifest.digest

    # The commands that it printed do the same.
    prepare, train, evaluate = (
        shlex.split(line)[2:] for line in ended.stderr.splitlines() if line.startswith("$ txl ")
    )
    assert (prepare[0], train[0], evaluate[0]) == ("prepare", "train", "eval")
    for words in (prepare, evaluate):
        target = words.index("--out") + 1
        words[target] += "-again"
        code, output = run_txl(*words)
        assert code == 0, output
    assert load_manifest(f"{out}/data-again").digest == manifest.digest
    again = json.loads((out / "test-again" / "result.json").read_text())
    assert again == evaluated
    return result


@pytest.mark.slow
def test_an_experiment_runs_from_its_file_to_its_score(tmp_path: Path) -> None:
    write_enwik8(tmp_path / "unpacked" / "archive")
    result = run_experiment("enwik8-base", tmp_path / "unpacked", tmp_path / "out")
    assert RECIPES["enwik8"].published_bytes == 100_000_000
    (difference,) = result["not_the_papers_data"]
    assert "the published file has 100,000,000" in difference


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_tokens, write_parquet])
def test_wikitext_103_gives_the_same_ids_in_every_layout(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    write(tmp_path / "published")
    out = tmp_path / "out"
    result = run_experiment("wt103-base", tmp_path / "published", out, "model.cutoffs=[20,40]")
    assert (
        f"valid has {ids_of(out / 'data', 'valid').size:,} tokens, the published 217,646"
        in (result["not_the_papers_data"])
    )
    tokenizer = open_tokenizer(out / "data")
    for split, size in SIZES.items():
        assert ids_of(out / "data", split).tolist() == tokenizer.encode(wikitext(size)).tolist()


def ids_of(dataset: Path, split: str) -> np.ndarray:
    source = open_split(dataset, split)
    return np.concatenate(
        [source.read(block, 0, int(n)) for block, n in enumerate(source.block_tokens)]
    )
