"""`txl eval` as a command: the keys of its JSON, exit codes and messages."""

import json
from pathlib import Path

import pytest

from tests.support.commands import run_txl, txl
from txl_dist.checkpoint.manifest import load_checkpoint_manifest


def test_the_score_as_json_has_the_promised_keys(dataset: Path, run: Path) -> None:
    ended = txl("eval", run, dataset, "--json")
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    manifest = json.loads((dataset / "manifest.json").read_text())
    assert result["tokens_scored"] == manifest["splits"]["valid"]["tokens"] - 1
    for key in ("nats", "perplexity", "bits_per_token", "bits_per_byte", "mode", "mem_len"):
        assert key in result


def test_several_splits_give_one_table_and_as_json_a_list(dataset: Path, run: Path) -> None:
    options = ("--mem-len", 0, "--tgt-len", 64)  # long segments are fast
    code, output = run_txl("eval", run, dataset, "--split", "train,valid", *options)
    assert code == 0, output
    header, train, valid, _ = output.splitlines()
    assert header.split()[:4] == ["checkpoint", "split", "targets", "nats/token"]
    assert "step-00000020" in train
    assert [line.split()[1] for line in (train, valid)] == ["train", "valid"]
    code, output = run_txl("eval", run, run, dataset, *options, "--json", "--resume")
    assert code == 0, output
    # The output contains standard error too, in any order.
    one, again = json.loads(next(line for line in output.splitlines() if line.startswith("[")))
    assert one == again
    assert one["split"] == "valid"
    assert f"{one['nats'] / one['tokens_scored']:.4f}" in valid


@pytest.mark.parametrize("option", [("--mem-len", 0), ("--tgt-len", 11), ("--clamp-len", 2)])
def test_memory_options_of_an_evaluation_change_the_score(
    dataset: Path, run: Path, option: tuple[str, int]
) -> None:
    plain = json.loads(run_txl("eval", run, dataset, "--json")[1])
    code, changed = run_txl("eval", run, dataset, "--json", *option)
    assert code == 0
    assert json.loads(changed)["nats"] != plain["nats"]


@pytest.mark.slow  # tests/cluster has the same of what the command calls
@pytest.mark.parametrize("on", ["processes", "ray"])
def test_an_evaluation_by_two_workers_is_that_of_one_process(
    dataset: Path, run: Path, on: str
) -> None:
    one = json.loads(run_txl("eval", run, dataset, "--json")[1])
    code, output = run_txl("eval", run, dataset, "--json", "--workers", 2, "--on", on)
    assert code == 0, output
    two = json.loads(output)
    assert two["tokens_scored"] == one["tokens_scored"]
    assert two["nats"] == pytest.approx(one["nats"], rel=1e-6)
    assert two["workers"] == 2


@pytest.mark.parametrize(
    "options",
    [("--same-length", "--mem-len", 0), ("--split", "valid,"), ("--split", "valid,valid")],
)
def test_impossible_evaluations_are_usage_errors(
    dataset: Path, run: Path, options: tuple[object, ...]
) -> None:
    assert run_txl("eval", run, dataset, "--on", "processes", *options)[0] == 2


def test_scoring_text_of_another_tokenizer_is_a_data_error(
    dataset: Path, run: Path, tmp_path: Path
) -> None:
    manifest = next((run / "checkpoints").glob("step-*")) / "manifest.json"
    copy = tmp_path / "checkpoints" / manifest.parent.name
    copy.mkdir(parents=True)
    for path in manifest.parent.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    rewrite_tokenizer_digest(copy / "manifest.json")
    code, output = run_txl("eval", copy, dataset)
    assert code == 3
    assert "tokenizer" in output


def rewrite_tokenizer_digest(path: Path) -> None:
    manifest = load_checkpoint_manifest(path.parent)
    other = manifest.model_copy(update={"tokenizer_digest": "f" * 64})
    path.write_bytes(other.to_json())


def test_a_missing_checkpoint_says_what_to_give(dataset: Path, tmp_path: Path) -> None:
    code, output = run_txl("eval", tmp_path / "nowhere", dataset)
    assert code == 4
    assert "run directory" in output


def test_a_damaged_checkpoint_is_not_evaluated(dataset: Path, run: Path, tmp_path: Path) -> None:
    source = sorted((run / "checkpoints").glob("step-*"))[-1]
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "weights-rank-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, output = run_txl("eval", tmp_path, dataset)
    assert code == 4
    assert "weights-rank-00000.safetensors" in output
    assert run_txl("checkpoint", "verify", tmp_path)[0] == 4
