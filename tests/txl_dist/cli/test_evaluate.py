"""`txl eval` as a command: the keys of its JSON, exit codes and messages."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from data_pipeline.shards.manifest import load_manifest
from data_pipeline.system.files import sha256_file
from tests.support.commands import run_txl, txl
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.convert.stored_model import find_model


def score(*words: object) -> Any:
    """The JSON that a command prints, which must succeed."""
    code, output = run_txl(*words, "--json")
    assert code == 0, output
    # The output contains standard error too, such as progress.
    return json.loads(next(line for line in output.splitlines() if line[0] in "[{"))


def test_the_score_as_json_has_the_promised_keys(dataset: Path, run: Path) -> None:
    ended = txl("eval", run, dataset, "--json")
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    manifest = json.loads((dataset / "manifest.json").read_text())
    assert result["tokens_scored"] == manifest["splits"]["valid"]["tokens"] - 1
    (checkpoint,) = (run / "checkpoints").glob("*20")
    data, model = load_manifest(dataset).digest, find_model(run).digest
    assert (result["data_sha256"], result["model_sha256"]) == (data, model)
    assert f"of {dataset.name} (sha256 {data[:12]})" in result["protocol"]
    assert f"model {run.name}/{checkpoint.name} (sha256 {model[:12]})" in result["protocol"]
    assert result.keys() >= {
        "nats", "perplexity", "bits_per_token", "bits_per_byte", "mode", "mem_len", "protocol",
        "word_perplexity", "bits_per_character",
    }  # fmt: skip
    kept = [json.loads(path.read_text()) for path in (run / "evaluations").glob("valid-*.json")]
    save_id = load_checkpoint_manifest(checkpoint).save_id
    assert {**result, "save_id": save_id} in kept, "for txl report and MLflow"


def test_a_watch_refuses_what_it_would_not_use(run: Path) -> None:
    code, output = run_txl("eval", "--watch", run, "--json", "--precision", "bf16", run)
    assert code == 2
    assert "leave out DATA, --precision, --json" in output


def test_several_splits_give_one_table_and_as_json_a_list(dataset: Path, run: Path) -> None:
    options = ("--mem-len", 0, "--tgt-len", 64)  # long segments are fast
    code, output = run_txl("eval", run, dataset, "--split", "train,valid", *options)
    assert code == 0, output
    # On a busy machine it takes long enough for lines of progress.
    lines = [line for line in output.splitlines() if not line.startswith("scoring: ")]
    header, train, valid, _, *protocols = lines
    assert header.split()[:6] == ["checkpoint", "split", "targets", "nats", "per", "token"]
    assert "step-00000020" in train
    assert [line.split()[1] for line in (train, valid)] == ["train", "valid"]
    name = f"{dataset.name} (sha256 {load_manifest(dataset).digest[:12]})"
    assert [line.split(": ")[2].split(",")[0] for line in protocols] == [
        f"split train of {name}",
        f"split valid of {name}",
    ]
    one, again = score("eval", run, run, dataset, *options, "--resume")
    assert one == again
    assert one["split"] == "valid"
    assert f"{one['nats'] / one['tokens_scored']:.4f}" in valid


@pytest.mark.parametrize("option", [("--mem-len", 0), ("--tgt-len", 11), ("--clamp-len", 2)])
def test_memory_options_of_an_evaluation_change_the_score(
    dataset: Path, run: Path, option: tuple[str, int]
) -> None:
    plain = score("eval", run, dataset)
    assert score("eval", run, dataset, *option)["nats"] != plain["nats"]


def test_max_tokens_scores_the_start_of_the_split_and_says_so(dataset: Path, run: Path) -> None:
    result = score("eval", run, dataset, "--max-tokens", 1301)
    assert (result["tokens_scored"], result["max_tokens"]) == (1300, 1301)
    assert result["protocol"].startswith("first 1,301 tokens of split valid of ")


@pytest.mark.parametrize(
    "options",
    [
        ("--same-length", "--mem-len", 0),
        ("--split", "valid,"),
        ("--split", "valid,valid"),
        ("--sweep", "mem_len=many"),
        ("--sweep", "mem_len=0,4", "--same-length"),
        ("--sweep", "mem_len=4", "--mem-len", 4),
        ("--sweep", "mem_len=4", "--per-document", "documents.jsonl"),
        ("--per-document", "no such folder/documents.jsonl"),
        ("--per-document", "."),
        ("--per-document", ""),
        ("--max-tokens", 1),
        ("--clamp-len", 10**20),
    ],
)
def test_impossible_evaluations_are_usage_errors(
    dataset: Path, run: Path, options: tuple[object, ...]
) -> None:
    assert run_txl("eval", run, dataset, "--on", "processes", *options)[0] == 2


def test_a_split_that_is_too_short_and_a_missing_checkpoint_say_what_to_give(
    dataset: Path, run: Path, tmp_path: Path
) -> None:
    code, output = run_txl("eval", run, dataset, "--tgt-len", 10**6)
    assert (code, "split valid" in output, "--tgt-len" in output) == (3, True, True)
    code, output = run_txl("eval", tmp_path / "nowhere", dataset)
    assert (code, "run directory" in output) == (4, True)


def test_the_documents_of_several_splits_are_in_one_file(
    dataset: Path, run: Path, tmp_path: Path
) -> None:
    path, out = tmp_path / "documents.jsonl", tmp_path / "out"
    path.write_text("of an earlier evaluation")
    words = ("eval", run, dataset, "--split", "valid,train", "--tgt-len", 64, "--details")
    results = score(*words, "--per-document", path, "--out", out)
    assert json.loads((out / "result.json").read_text()) == results
    documents = [json.loads(line) for line in path.read_text().splitlines()]
    for result in results:
        own = [each for each in documents if each["split"] == result["split"]]
        assert sum(each["tokens"] for each in own) == result["tokens_scored"]
        assert sum(each["bytes"] for each in own) == result["bytes_scored"]
        assert sum(each["nats"] for each in own) == pytest.approx(result["nats"], rel=1e-12)
        assert {each["checkpoint"] for each in own} == {result["checkpoint"]}
        for table in ("document_position", "segment_position", "token_frequency"):
            rows = result["details"][f"by_{table}"]
            assert sum(row["tokens"] for row in rows) == result["tokens_scored"]
    assert len({each["id"] for each in documents}) == len(documents)


def test_a_sweep_selects_on_the_first_split_and_reports_on_the_second(
    dataset: Path, run: Path, tmp_path: Path
) -> None:
    values = ("--sweep", "mem_len=0,64", "--sweep", "clamp_len=0,8")
    options = (*values, "--split", "valid,train", "--tgt-len", 256)
    result = score("eval", run, dataset, *options, "--out", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == result
    best = min(result["candidates"], key=lambda each: each["nats"])
    assert [each["selected"] for each in result["candidates"]].count(True) == 1
    assert best["selected"]
    (reported,) = result["reported"]
    for name in ("mem_len", "clamp_len"):
        assert result["selected"][name] == best[name] == reported[name]
    assert (result["selected_on"], reported["split"]) == ("valid", "train")
    assert len(result["candidates"]) == 4


# --- checkpoints that must not be scored ----------------------------------------------------------


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """A copy of the newest checkpoint, which a test may damage."""
    source = sorted((run / "checkpoints").glob("step-*"))[-1]
    return shutil.copytree(source, tmp_path / source.name)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(
    dataset: Path, copy: Path, value: float
) -> None:
    weights, manifest = copy / "weights-rank-00000.safetensors", load_checkpoint_manifest(copy)
    tensors = load_file(weights)
    tensors[sorted(tensors)[2]].view(-1)[1] = value
    save_file(tensors, weights)
    entry = manifest.files[weights.name].model_copy(
        update={"bytes": weights.stat().st_size, "sha256": sha256_file(weights)}
    )
    files = {**manifest.files, weights.name: entry}
    (copy / "manifest.json").write_bytes(manifest.model_copy(update={"files": files}).to_json())
    code, output = run_txl("eval", copy, dataset)
    assert code == 4
    assert "has values that are NaN or Inf" in output
    assert "txl checkpoint list" in output


def test_a_damaged_checkpoint_is_not_evaluated(dataset: Path, copy: Path) -> None:
    weights = copy / "weights-rank-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, output = run_txl("eval", copy, dataset)
    assert (code, weights.name in output) == (4, True)
    assert run_txl("checkpoint", "verify", copy)[0] == 4
