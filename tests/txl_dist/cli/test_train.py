"""`txl train`, `eval`, `generate`, `checkpoint` as commands: exit codes and messages for people."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.commands import ENVIRONMENT, txl
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import TINY, tiny_job, train
from txl_dist.cli.app import app
from txl_dist.errors import TxlError


def run_txl(*words: object) -> tuple[int, str]:
    """Exit code and message of a command, run in this process (it starts nothing)."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, TxlError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def run(ranks: RankGroups, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    assert ranks(1).run(train, tiny_job(dataset, run, "evaluation.max_tokens=300")) == [0]
    return run


def test_more_ranks_than_lanes_is_a_config_error(dataset: Path, tmp_path: Path) -> None:
    code, told = run_txl(
        "train", TINY, f"data.path={dataset}", f"directory={tmp_path}", "--ranks", 6
    )
    assert code == 2
    assert "6 ranks for data.num_lanes=5" in told


def test_missing_data_names_the_manifest_and_the_command_that_makes_it(tmp_path: Path) -> None:
    code, told = run_txl("train", TINY, f"data.path={tmp_path / 'none'}")
    assert code == 3
    assert "manifest.json" in told
    assert "txl prepare" in told


def test_a_manifest_of_another_vocabulary_is_a_data_error(dataset: Path, tmp_path: Path) -> None:
    given = (f"data.path={dataset}", f"directory={tmp_path}", "model.vocab_size=1000")
    code, told = run_txl("train", TINY, *given)
    assert code == 3
    assert "model.vocab_size=1000" in told
    assert "257 ids" in told


def test_a_missing_split_lists_the_splits_there_are(dataset: Path, tmp_path: Path) -> None:
    given = (f"data.path={dataset}", f"directory={tmp_path}", "evaluation.split=test")
    code, told = run_txl("train", TINY, *given)
    assert code == 3
    assert "train" in told
    assert "valid" in told


def test_a_dry_run_writes_no_run(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = (f"data.path={dataset}", f"directory={run}", "--on", "processes", "--dry-run")
    code, told = run_txl("train", TINY, *given)
    assert code == 0
    assert "ready" in told
    assert not run.exists()


@pytest.mark.parametrize("options", [("--same-length", "--mem-len", 0), ("--workers", 3)])
def test_impossible_evaluations_are_usage_errors(
    dataset: Path, run: Path, options: tuple[object, ...]
) -> None:
    assert run_txl("eval", run, dataset, "--on", "processes", *options)[0] == 2


def test_a_misspelt_allow_change_names_the_nearest_setting(dataset: Path, tmp_path: Path) -> None:
    given = (f"data.path={dataset}", f"directory={tmp_path}", "--allow-change", "optimizer.lrr")
    code, told = run_txl("train", TINY, *given)
    assert code == 2
    assert "did you mean optimizer.lr?" in told


def test_a_directory_in_use_is_refused_and_its_run_not_disturbed(
    dataset: Path, tmp_path: Path
) -> None:
    from txl_dist.training.run_directory import RunDirectory

    directory = RunDirectory(tmp_path)
    directory.create()
    given = (f"data.path={dataset}", f"directory={tmp_path}", "--on", "processes")
    with directory.locked():
        before = sorted(path.name for path in tmp_path.rglob("*"))
        code, told = run_txl("train", TINY, *given)
        assert code == 2
        assert "in use by another run" in told
        assert sorted(path.name for path in tmp_path.rglob("*")) == before


@pytest.mark.slow  # tests/cluster has the same of what the command calls
def test_an_evaluation_on_ray_is_that_of_one_process(dataset: Path, run: Path) -> None:
    one = json.loads(run_txl("eval", run, dataset, "--json")[1])
    code, told = run_txl("eval", run, dataset, "--json", "--workers", 2)
    assert code == 0, told
    two = json.loads(told)
    assert two["tokens_scored"] == one["tokens_scored"]
    assert two["nats"] == pytest.approx(one["nats"], rel=1e-6)


def test_a_run_directory_that_cannot_be_written_is_refused_first(
    dataset: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    given = (f"data.path={dataset}", f"directory={tmp_path / 'file' / 'run'}")
    code, told = run_txl("train", TINY, *given, "--on", "processes")
    assert code == 2
    assert "directory=PATH" in told


def test_the_score_as_json_has_the_promised_keys(dataset: Path, run: Path) -> None:
    done = txl("eval", run, dataset, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    manifest = json.loads((dataset / "manifest.json").read_text())
    assert found["tokens_scored"] == manifest["splits"]["valid"]["tokens"] - 1
    for key in ("nats", "perplexity", "bits_per_token", "bits_per_byte", "mode", "mem_len"):
        assert key in found


def test_a_checkpoint_of_another_model_ends_training_with_4(dataset: Path, run: Path) -> None:
    given = (f"data.path={dataset}", f"directory={run}", "model.d_inner=48")
    code, told = run_txl("train", TINY, *given, "--on", "processes", "--ranks", 1)
    assert code == 4
    assert "model.d_inner: checkpoint 32, now 48" in told


@pytest.mark.parametrize("option", [("--mem-len", 0), ("--tgt-len", 11), ("--clamp-len", 2)])
def test_memory_options_of_an_evaluation_change_the_score(
    dataset: Path, run: Path, option: tuple[str, int]
) -> None:
    plain = json.loads(run_txl("eval", run, dataset, "--json")[1])
    code, changed = run_txl("eval", run, dataset, "--json", *option)
    assert code == 0
    assert json.loads(changed)["nats"] != plain["nats"]


def test_scoring_text_of_another_tokenizer_is_a_data_error(
    dataset: Path, run: Path, tmp_path: Path
) -> None:
    manifest = next((run / "checkpoints").glob("step-*")) / "manifest.json"
    copy = tmp_path / "checkpoints" / manifest.parent.name
    copy.mkdir(parents=True)
    for path in manifest.parent.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    rewrite_tokenizer_digest(copy / "manifest.json")
    code, told = run_txl("eval", copy, dataset)
    assert code == 3
    assert "tokenizer" in told


def rewrite_tokenizer_digest(path: Path) -> None:
    from txl_dist.checkpoint.manifest import load_checkpoint_manifest

    manifest = load_checkpoint_manifest(path.parent)
    other = manifest.model_copy(update={"tokenizer_digest": "f" * 64})
    path.write_bytes(other.to_json())


def test_a_missing_checkpoint_says_what_to_give(dataset: Path, tmp_path: Path) -> None:
    code, told = run_txl("eval", tmp_path / "nowhere", dataset)
    assert code == 4
    assert "run directory" in told


def test_a_damaged_checkpoint_is_not_evaluated(dataset: Path, run: Path, tmp_path: Path) -> None:
    source = sorted((run / "checkpoints").glob("step-*"))[-1]
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "weights-rank-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, told = run_txl("eval", tmp_path, dataset)
    assert code == 4
    assert "weights-rank-00000.safetensors" in told
    assert run_txl("checkpoint", "verify", tmp_path)[0] == 4


def test_the_same_seed_generates_the_same_text(run: Path) -> None:
    asked = ("generate", run, "--prompt", "def f(", "--max-tokens", 12, "--json")
    first, again = run_txl(*asked), run_txl(*asked)
    assert first == again
    assert first[0] == 0
    other = run_txl(*asked, "--seed", 1)
    assert json.loads(other[1])["text"] != json.loads(first[1])["text"]


def test_checkpoints_are_listed_with_what_they_hold(run: Path) -> None:
    code, told = run_txl("checkpoint", "list", run, "--json")
    assert code == 0
    listed = json.loads(told)["checkpoints"]
    assert [row["step"] for row in listed] == [18, 20]
    assert listed[-1]["tokens"] == 300


def test_an_error_goes_to_standard_error_with_its_exit_code(tmp_path: Path) -> None:
    done = txl("eval", tmp_path / "nowhere", tmp_path, "--json")
    assert done.returncode == 4
    assert done.stdout == ""
    assert done.stderr.startswith("CheckpointError: ")


def test_torchrun_trains_too(dataset: Path, tmp_path: Path) -> None:
    given = (f"data.path={dataset}", f"directory={tmp_path}", "evaluation.split=null")
    launch = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", 2)
    command = ["torch.distributed.run", *launch, "-m", "txl_dist", "train", TINY, *given]
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    assert "step 20 | loss" in done.stdout
    assert (tmp_path / "checkpoints" / "step-00000020").is_dir()
