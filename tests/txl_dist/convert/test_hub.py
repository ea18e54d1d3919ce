"""`txl export --format hf`: a directory for people without txl, which txl reads, too."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from tokenizers import Tokenizer as LibraryTokenizer

from data_pipeline.shards.manifest import PrepareSettings
from data_pipeline.tokenizers import ByteTokenizer, Tokenizer, train_tokenizer
from tests.support.commands import run_txl
from tests.support.prepared import prepared
from tests.support.run_directories import evaluation, start, write_events
from tests.support.small_models import small_model
from tests.txl_dist.checkpoint import saving
from txl_dist.analysis.model_card import TransformersExport, card
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.convert.hub import write_for_hub
from txl_dist.convert.stored_model import Reading, find_model
from txl_dist.errors import CheckpointError
from txl_dist.evaluation.result import EvaluationResult, read_result
from txl_dist.model.config import ModelConfig
from txl_dist.training.scores import ScoreTable

ROOT = Path(__file__).parents[3]
TEXT = ("--prompt", "def ", "--max-tokens", 9, "--temperature", 2, "--seed", 4)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    saving.save(path, step=2)
    table = ScoreTable(saving.CheckpointDirectory(path), is_due=lambda step: True)
    table.add(saving.BEST.model_copy(update={"step": 2, "nats": 21.0, "tokens_scored": 10}))
    write_events(path, start(0))
    return path


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    texts = ("the tide comes in, the tide goes out. " * 9, "and out again. " * 9)
    return prepared(tmp_path / "data", *texts, split={"valid": 0.5})


def export(run: Path, out: Path, *options: object) -> str:
    code, output = run_txl("export", run, "--format", "hf", "--out", out, *options)
    assert code == 0, output
    return (out / "README.md").read_text()


def test_the_directory_is_a_model_of_txl_without_a_pickle(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "hf")
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert names == {
        "README.md", "config.json", "model.safetensors", "transformer_xl.py", "txl_tokenizer.json",
    }  # fmt: skip
    texts = [
        json.loads(run_txl("generate", path, *TEXT, "--json")[1])["text"]
        for path in (run, tmp_path / "hf")
    ]
    assert texts[0] == texts[1]
    digest = find_model(run).tokenizer
    assert digest
    assert find_model(tmp_path / "hf").tokenizer == type(digest)(
        tmp_path / "hf" / "txl_tokenizer.json", digest.digest
    )
    code, output = run_txl("import", tmp_path / "hf", "--out", tmp_path / "again")
    assert (code, "needs no import" in output) == (2, True)


@pytest.mark.slow
def test_its_file_continues_a_prompt_as_txl_does(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "hf")
    words = [str(word) for word in TEXT]
    command = [sys.executable, "-I", str(tmp_path / "hf" / "transformer_xl.py"), *words]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    ours = json.loads(run_txl("generate", run, *TEXT, "--json")[1])
    assert done.stdout.decode() == f"def {ours['text']}\n"


@pytest.mark.slow
def test_the_programs_of_the_how_to_and_of_the_card_run(run: Path, tmp_path: Path) -> None:
    card = export(run, tmp_path / "hf")
    how_to = ROOT / "docs" / "how_to" / "share_a_model.md"
    for text in (how_to.read_text("utf-8"), card):
        (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path / "hf",
            env={"PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_a_tokenizer_of_the_library_is_written_for_it_and_for_txl(tmp_path: Path) -> None:
    settings = PrepareSettings(tokenizer="bpe", vocab_size=280)
    bpe = train_tokenizer(settings, lambda: iter(["the tide comes in, the tide goes out"]))
    model = small_model(vocab_size=bpe.vocab_size)
    write_for_hub(tmp_path, model, bpe, Reading(tgt_len=4, reset="document"), card="")
    library = LibraryTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert library.encode("the tide").ids == bpe.encode("the tide").tolist()
    stored = find_model(tmp_path)
    assert stored.tokenizer
    assert stored.tokenizer.digest == bpe.digest
    assert stored.tokenizer.load() is not None


def test_the_card_says_what_the_run_knows_and_no_more(run: Path, tmp_path: Path) -> None:
    card = export(run, tmp_path / "hf")
    number = sum(p.numel() for p in saving.model(2).parameters())
    for fact in (f"{number:,} parameters", "for 2 steps", "`recurrent`: mem_len 5", "| cpu |"):
        assert fact in card
    assert "2.1000 nats per token" in card
    assert "10 tokens scored" in card
    # Of three lanes a step reads one: the batch is a row of four tokens.
    assert "| `data.num_lanes` | 3 |\n| `data.lanes_per_step` | 1 |\n| `data.tgt_len` | 4 |" in card
    for unknown in ("None |", "null", "license:", "language:", "hours", "documents of"):
        assert unknown not in card
    (run / "events.jsonl").unlink()
    assert "device of a rank" not in export(run, tmp_path / "again")


EXPORT = TransformersExport(dtype="float32", window=5)
ADDS_BEGIN = ByteTokenizer()
ADDS_BEGIN.ends_of_text = (10,)
CHARACTERS = train_tokenizer(PrepareSettings(tokenizer="char"), lambda: iter(["a word"]))


@pytest.mark.parametrize(
    ("tokenizer", "texts"),
    [
        (ByteTokenizer(), ['tokenizer(tokenizer.bos_token + "Once', "Documents began with"]),
        (ADDS_BEGIN, ['tokenizer("Once', "Documents began with"]),
        (ByteTokenizer(opens_documents=False), ['tokenizer("Once', "No token began a document"]),
        (CHARACTERS, ["token ids are those of `txl_tokenizer.json`"]),
    ],
    ids=["bytes", "of Llama", "no begin", "characters"],
)
def test_a_card_for_transformers_has_a_program_that_runs(
    run: Path, tokenizer: Tokenizer, texts: list[str]
) -> None:
    checkpoint = saving.CheckpointDirectory(run).at(2)
    manifest = load_checkpoint_manifest(checkpoint)
    text = card(checkpoint, manifest, saving.model(2), tokenizer, export=EXPORT)
    for expected in texts:
        assert expected in text
    assert ("AutoTokenizer" in text) == (len(texts) == 2)
    assert "carried a memory" in text
    model = {**manifest.model, "mem_len": 0}
    bare = manifest.model_copy(update={"model": model})
    text = card(checkpoint, bare, saving.model(2), tokenizer, export=replace(EXPORT, window=None))
    assert "read every segment of a text by itself" in text
    assert "recurrent-memory" not in text


@pytest.mark.parametrize(
    ("same_length", "changes"),
    [
        (True, {}),
        (True, {"dtype": "bfloat16"}),
        (True, {"window": 4}),
        (False, {}),
        (False, {"window": 7, "nats": 2.25, "data": "data/books", "split": "valid"}),
    ],
    ids=str,
)
def test_metadata_of_a_card_for_transformers_has_scores_of_its_files_only(
    run: Path, tmp_path: Path, same_length: bool, changes: dict[str, Any]
) -> None:
    checkpoint = saving.CheckpointDirectory(run).at(2)
    manifest = load_checkpoint_manifest(checkpoint)
    manifest = manifest.model_copy(update={"model": manifest.model | {"same_length": same_length}})
    scores = [tmp_path / "5.json", tmp_path / "9.json"]  # the memory of training, and another one
    for path in scores:
        mem_len = int(path.stem)
        score = evaluation(find_model(checkpoint).digest, mem_len=mem_len, nats=mem_len / 2)
        path.write_text(json.dumps(score))
    text = card(
        checkpoint,
        manifest,
        saving.model(2),
        ByteTokenizer(),
        scores=scores,
        export=replace(EXPORT, **changes),
    )
    is_run = same_length and not changes
    index = yaml.safe_load(text.split("---")[1]).get("model-index", [{"results": []}])
    metrics = [metric for result in index[0]["results"] for metric in result["metrics"]]
    values = [metric["value"] for metric in metrics]
    assert (2.5 in values, 4.5 in values) == (is_run, False)
    assert ("Of the run in fp32 with its memory, not of these files:" in text) == (not is_run)
    assert text.count("Protocol: ") == 2
    assert f"A token sees {changes.get('window', 5)} tokens up to itself" in text
    assert ("itself, as in training" in text) == (same_length and "window" not in changes)
    assert ("In training it saw up to 9, by its place" in text) == (not same_length)
    assert ("In training it saw 5: these" in text) == (same_length and "window" in changes)
    assert ("2.25000 nats per token of split `valid` of `books`" in text) == ("nats" in changes)


def test_the_card_has_the_window_that_data_chose(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 257, "n_layer": 2, "d_model": 6, "n_head": 3, "d_head": 2, "d_inner": 7,
        "mem_len": 5,
    }  # fmt: skip
    config = ModelConfig.of_recipe("modern", **sizes)
    monkeypatch.setattr(saving, "CONFIG", config)
    monkeypatch.setattr(
        saving, "HEADER", saving.HEADER.model_copy(update={"model": asdict(config)})
    )
    saving.save(tmp_path / "run", step=2)
    words = ("--format", "transformers", "--data", dataset, "--split", "valid", "--json")
    code, output = run_txl("export", tmp_path / "run", *words, "--out", tmp_path / "out")
    assert code == 0, output
    window = json.loads(output)["window"]
    assert window in range(5, 10)
    text = (tmp_path / "out" / "README.md").read_text()
    assert f"A token sees {window} tokens up to itself. In training it saw up to 9" in text
    assert re.search(r"fp32: \d\.\d{5} nats per token of split `valid` of `data`", text)


def test_scores_are_in_the_card_with_their_protocol_and_as_hubs_read_them(
    run: Path, dataset: Path, tmp_path: Path
) -> None:
    code, result = run_txl("eval", run, dataset, "--split", "valid", "--json")
    assert code == 0, result
    (tmp_path / "valid.json").write_text(result)
    score = json.loads(result)
    card = export(run, tmp_path / "hf", "--scores", tmp_path / "valid.json")
    assert f"Protocol: {score['protocol']}" in card
    read = ModelCard.load(tmp_path / "hf" / "README.md").data
    assert read.pipeline_tag == "text-generation"
    metrics = {each.metric_type: each.metric_value for each in read.eval_results}
    assert metrics["perplexity"] == score["perplexity"]
    assert yaml.safe_load(card.split("---")[1])["model-index"][0]["name"] == "run"


def test_without_scores_the_card_has_those_of_these_weights_that_the_run_keeps(
    run: Path, dataset: Path, tmp_path: Path
) -> None:
    code, result = run_txl("eval", run, dataset, "--split", "valid", "--json")
    assert code == 0, result
    protocol = json.loads(result)["protocol"]
    assert f"Protocol: {protocol}" in export(run, tmp_path / "hf")
    saving.save(run, step=3)
    assert "Protocol:" not in export(run, tmp_path / "other weights")


@pytest.mark.parametrize(
    "changes",
    [{"perplexity": "<script>"}, {"data_sha256": None}, {"protocol": 1}, {"bits_per_byte": True}],
    ids=str,
)
def test_an_edited_score_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    result = {**evaluation("m", mem_len=4, nats=2.5), "bits_per_byte": None}
    path = tmp_path / "score.json"
    path.write_text(json.dumps(result))
    assert read_result(path, model_digest="m") == EvaluationResult.model_validate(result)
    path.write_text(json.dumps({**result, **changes}))
    with pytest.raises(CheckpointError, match="not a result of txl eval"):
        read_result(path, model_digest="m")
    path.write_text(json.dumps({key: result[key] for key in result if key != "data_sha256"}))
    with pytest.raises(CheckpointError, match="not a result of txl eval"):
        read_result(path, model_digest="m")


def test_the_score_of_another_model_is_refused(run: Path, dataset: Path, tmp_path: Path) -> None:
    saving.save(tmp_path / "other", step=3)
    _, result = run_txl("eval", tmp_path / "other", dataset, "--split", "valid", "--json")
    (tmp_path / "score.json").write_text(result)
    (tmp_path / "no.json").write_text("[]")
    for name, text in (("score.json", "score of another model"), ("no.json", "not a result")):
        code, output = run_txl(
            "export", run, "--format", "hf", "--out", tmp_path / "hf", "--scores", tmp_path / name
        )
        assert (code, text in output) == (4, True)
    assert not (tmp_path / "hf").exists()
    code, output = run_txl("export", run, "--out", tmp_path / "x", "--scores", tmp_path / "no.json")
    assert (code, "--format hf" in output) == (2, True)
