"""`txl reproduce`: from files as they are published to a score, by the documented commands. The
files are found in every published layout, and compared with the published ones.
"""

import hashlib
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from data_pipeline.shards.manifest import load_manifest, open_tokenizer
from data_pipeline.shards.shard_reader import open_split
from tests.support.commands import run_txl, txl
from tests.support.corpus_layouts import SIZES, wikitext, write_parquet, write_tokens
from txl_dist.cli.app import app
from txl_dist.cli.reproduce import SHRUNK, Corpus, Layout, Plan, experiments, find_published
from txl_dist.config.config_file import load_run_config
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


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["enwik9-base"], ConfigError, "expected one of wt103-base, "),
        (["enwik8-base"], ConfigError, "--data DIR, the published files of mattmahoney.net"),
        (["wt103-base", "--data", "."], DataError, "wiki.train.tokens, wiki.valid.tokens, "),
        (["wt103-base", "--data", "none"], DataError, "none: there is no such file or directory"),
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


def write_ptb(folder: Path) -> None:
    folder.mkdir()
    for split, size in (("train", 3000), ("valid", 300), ("test", 300)):
        (folder / f"ptb.{split}.txt").write_text(wikitext(size))


@pytest.mark.parametrize("options", [(), ("--shrink",)], ids=["", "shrunk"])
def test_a_dry_run_checks_the_config_and_starts_nothing(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ptb(tmp_path / "ptb")
    monkeypatch.chdir(tmp_path)
    words = ("reproduce", "ptb", "--data", "ptb", "--dry-run", *options)
    code, output = run_txl(*words, "optimizer.lr=1e-3", "--json")
    assert code == 0, output
    plan = json.loads(output)
    _, train, evaluate = plan["commands"]
    assert train[:3] == ["txl", "train", "paper/ptb"]
    assert "optimizer.lr=1e-3" in train
    assert evaluate[evaluate.index("--mem-len") + 1] == ("32" if options else "256")
    assert len(plan["not_the_papers_data"]) == 3
    (difference,) = plan["not_the_papers_code"]
    assert f"not as the paper's code: {difference}\n" in run_txl(*words)[1]
    assert plan["shrunk"] == bool(options) == ("NO REPRODUCTION" in run_txl(*words)[1])
    assert run_txl(*words, "optimizer.lr=-1")[0] == 2
    assert [*tmp_path.iterdir()] == [tmp_path / "ptb"]


@pytest.mark.parametrize("name", experiments())
def test_every_experiment_can_be_shrunk_also_for_a_sample_of_its_corpus(
    name: str, tmp_path: Path
) -> None:
    experiment, found = experiments()[name], find_published(WT103, write_tokens(tmp_path))
    plan = Plan(name=name, experiment=experiment, found=found, out=tmp_path, is_shrunk=True)
    config = load_run_config(experiment.config, [*plan.settings(), "model.vocab_size=257"])
    original = load_run_config(experiment.config, experiment.settings)
    assert (config.model.mem_len == 0) == (original.model.mem_len == 0)
    assert config.model.distance_encoding == original.model.distance_encoding
    assert (config.num_steps, config.model.d_model) == (20, 64)


@pytest.mark.parametrize("name", experiments())
def test_the_score_is_per_word_or_per_character(name: str, tmp_path: Path) -> None:
    """A word is with one mark per line, also for lm1b, whose tokens have two."""
    experiment, found = experiments()[name], find_published(WT103, write_tokens(tmp_path))
    plan = Plan(name=name, experiment=experiment, found=found, out=tmp_path)
    scores = {"perplexity": 20.0, "word_perplexity": 23.5, "bits_per_token": 1.0}
    expected = 1.0 if name.startswith(("enwik8", "text8")) else 23.5
    assert plan.comparison([], scores)["score"] == expected


@pytest.mark.parametrize(
    ("name", "symbols"),
    [("enwik8-base", "line breaks"), ("lm1b-base", "the mark where a line begins")],
)
def test_symbols_that_only_this_code_scores_are_listed(name: str, symbols: str) -> None:
    assert any(each.startswith(symbols) for each in experiments()[name].corpus.differences)


@pytest.mark.slow
def test_a_shrunken_experiment_runs_and_says_what_it_is(tmp_path: Path) -> None:
    write_ptb(tmp_path / "ptb")
    words = ("reproduce", "ptb", "--data", tmp_path / "ptb", "--out", tmp_path / "out")
    ended = txl(*words, "--shrink", "--on", "processes", timeout_seconds=300)
    assert ended.returncode == 0, ended.stderr
    assert "NO REPRODUCTION" in ended.stdout
    result = json.loads((tmp_path / "out" / "reproduction.json").read_text())
    assert result["shrunk"]
    assert result["evaluation"]["mem_len"] == 32
    assert {*SHRUNK} <= {*result["overrides"]}


def write_archive(folder: Path) -> Path:
    write_tokens(folder.parent / "unpacked")
    return Path(
        shutil.make_archive(str(folder / "wikitext-103-v1"), "zip", folder.parent / "unpacked")
    )


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_tokens, write_parquet, write_archive])
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


# --- published files ------------------------------------------------------------------------------

WT103, LM1B, ENWIK8 = (experiments()[f"{name}-base"].corpus for name in ("wt103", "lm1b", "enwik8"))
SPLITS = ("train", "valid", "test")
HUGGING_FACE = [f"{split}-00000-of-00001.parquet" for split in ("train", "validation", "test")]
PTB, CONVERTED = experiments()["ptb"].corpus, "wikitext-103-v1/{}/0000.parquet"


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


@pytest.mark.parametrize("above", ["", "archive/"])
@pytest.mark.parametrize(
    ("corpus", "names"),
    [
        (WT103, [f"wiki.{split}.tokens" for split in SPLITS]),
        (WT103, [f"wiki.{split}.raw" for split in SPLITS]),
        (WT103, HUGGING_FACE),
        (WT103, [CONVERTED.format(split) for split in ("train", "validation", "test")]),
        (PTB, [f"ptb.{split}.txt" for split in SPLITS]),
        (PTB, [f"data/ptb.{split}.txt" for split in SPLITS]),
        (PTB, [f"penn/{split}.txt" for split in SPLITS]),
    ],
)
def test_every_layout_is_found_in_the_directory_or_one_folder_below(
    above: str, corpus: Corpus, names: list[str], tmp_path: Path
) -> None:
    write(tmp_path / above, *names)
    found = find_published(corpus, tmp_path)
    assert found.inputs()[0] == f"train={tmp_path / above / names[0]}"
    assert [word.partition("=")[0] for word in found.inputs()] == [*SPLITS]
    places = [path.relative_to(tmp_path / above) for split in SPLITS for path in found.files(split)]
    assert [place.as_posix() for place in places] == names


def test_of_hugging_face_s_configurations_the_paper_s_is_taken(tmp_path: Path) -> None:
    configurations = ("wikitext-103-raw-v1", "wikitext-103-v1", "wikitext-2-v1")
    for name in configurations:
        write(tmp_path / name, *HUGGING_FACE)
    found = find_published(WT103, tmp_path)
    assert {path.parent.name for path in found.files("train")} == {"wikitext-103-v1"}
    for path in (tmp_path / "wikitext-103-v1").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"several folders: .*raw-v1, .*2-v1\. Give one of them"):
        find_published(WT103, tmp_path)


def test_several_files_of_a_split_are_one_pattern(tmp_path: Path) -> None:
    names = [f"train-{n:05}-of-00002.parquet" for n in range(2)]
    write(tmp_path / "a[b]", *names, *HUGGING_FACE[1:])
    found = find_published(WT103, tmp_path)
    assert found.inputs()[0] == f"train={tmp_path}/a[[]b]/train-*.parquet"


@pytest.mark.parametrize("name", ["enwik8", "enwik8.zip", "enwik8.bz2"])
@pytest.mark.parametrize("as_file", [False, True])
def test_a_compressed_file_is_given_to_prepare_as_it_is(
    name: str, as_file: bool, tmp_path: Path
) -> None:
    write(tmp_path, name, *(["enwik8.gz"] if as_file else []))
    found = find_published(ENWIK8, tmp_path / name if as_file else tmp_path)
    assert found.inputs() == [str(tmp_path / name)]


@pytest.mark.parametrize(
    ("corpus", "name", "inputs"),
    [
        (WT103, "wikitext-103-v1.zip", [f"/wiki.{split}.tokens" for split in SPLITS]),
        (PTB, "simple-examples.tgz", [f"/data/ptb.{split}.txt" for split in SPLITS]),
        (
            LM1B,
            "1-billion-word-language-modeling-benchmark-r13output.tar.gz",
            [
                "/training-monolingual.tokenized.shuffled/news.en-*",
                "/heldout-monolingual.tokenized.shuffled/news.en.heldout-00001-of-00050",
                "/heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050",
            ],
        ),
    ],
    ids=["wt103", "ptb", "lm1b"],
)
def test_of_an_archive_the_published_files_are_read_and_no_others(
    corpus: Corpus, name: str, inputs: list[str], tmp_path: Path
) -> None:
    write(tmp_path, name)
    expected = [
        f"{split}={tmp_path / name}{path}" for split, path in zip(SPLITS, inputs, strict=True)
    ]
    for given in (tmp_path, tmp_path / name):
        assert find_published(corpus, given).inputs() == expected


def test_an_incomplete_layout_is_not_used(tmp_path: Path) -> None:
    write(tmp_path, "wiki.train.tokens", "wiki.test.tokens")
    with pytest.raises(DataError, match=r"WikiText-103.*wiki.valid.tokens.*validation"):
        find_published(WT103, tmp_path)


def test_the_test_set_of_lm1b_is_the_first_held_out_file(tmp_path: Path) -> None:
    heldout = "heldout-monolingual.tokenized.shuffled/news.en.heldout-{:05}-of-00050"
    train = "training-monolingual.tokenized.shuffled/news.en-{:05}-of-00100"
    write(tmp_path, *map(heldout.format, range(50)), *map(train.format, range(1, 98)))
    found = find_published(LM1B, tmp_path)
    assert found.files("test") == [tmp_path / heldout.format(0)]
    assert found.files("valid") == [tmp_path / heldout.format(1)]
    assert len(found.files("train")) == 97
    missing = [f"news.en-000{number}-of-00100 is missing" for number in (98, 99)]
    assert [*found.differences()] == missing


def test_a_file_is_the_published_one_if_and_only_if_its_bytes_are(tmp_path: Path) -> None:
    content = b"the published text"
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    layout = Layout(inputs={"all": "enwik8"}, files={"enwik8": digest})
    corpus = Corpus(recipe="enwik8", layouts=(layout,), source="nowhere")
    for written, num_differences in ((content, 0), (content[:-1] + b"T", 1), (content + b"s", 1)):
        (tmp_path / "enwik8").write_bytes(written)
        assert len([*find_published(corpus, tmp_path).differences()]) == num_differences
