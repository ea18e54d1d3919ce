"""`txl train` as a command: exit codes and messages."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ENVIRONMENT, run_txl
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, TINY, tiny_spec, train


def test_a_range_of_ranks_needs_ray_and_a_lane_for_each(dataset: Path, tmp_path: Path) -> None:
    words = ("train", TINY, f"data.path={dataset}", f"directory={tmp_path}")
    code, output = run_txl(*words, "--on", "processes", "--ranks", "1:2")
    assert code == 2
    assert "--ranks 1:2 with --on processes" in output
    assert "or the address of a Ray cluster" in output
    for ranks in ("6", "2:6"):
        code, output = run_txl(*words, "--ranks", ranks)
        assert (code, "6 ranks for data.num_lanes=5" in output) == (2, True)


def test_missing_data_names_the_manifest_and_the_command_that_makes_it(tmp_path: Path) -> None:
    code, output = run_txl("train", TINY, f"data.path={tmp_path / 'none'}")
    assert code == 3
    assert "manifest.json" in output
    assert "txl prepare" in output


def test_a_manifest_of_another_vocabulary_is_a_data_error(dataset: Path, tmp_path: Path) -> None:
    arguments = (f"data.path={dataset}", f"directory={tmp_path}", "model.vocab_size=1000")
    code, output = run_txl("train", TINY, *arguments)
    assert code == 3
    assert "model.vocab_size=1000" in output
    assert "257 ids" in output


def test_a_missing_split_lists_the_splits_there_are(dataset: Path, tmp_path: Path) -> None:
    arguments = (f"data.path={dataset}", f"directory={tmp_path}", "evaluation.split=test")
    code, output = run_txl("train", TINY, *arguments)
    assert code == 3
    assert "train" in output
    assert "valid" in output


def test_a_dry_run_writes_no_run(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = (f"data.path={dataset}", f"directory={run}", "--on", "processes", "--dry-run")
    code, output = run_txl("train", TINY, *arguments)
    assert code == 0
    assert "ready" in output
    assert not run.exists()


def test_a_change_that_the_newest_checkpoint_refuses_is_found_before_any_rank_starts(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    ranks(1).run(train, tiny_spec(dataset, tmp_path, NO_EVALUATION))
    words = ("train", TINY, f"data.path={dataset}", f"directory={tmp_path}", NO_EVALUATION)
    assert run_txl(*words, "--dry-run")[0] == 0
    for change in ("optimizer.lr=0.5", "model.n_layer=1"):
        code, output = run_txl(*words, change, "--dry-run")
        assert code == 4
        assert change.partition("=")[0] in output
    allowed = ("optimizer.lr=0.5", "--allow-change", "optimizer.lr", "--dry-run")
    assert run_txl(*words, *allowed)[0] == 0
    # The ranks refuse it, or fall back to an older checkpoint.
    for manifest in tmp_path.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{}")
    assert run_txl(*words, "model.n_layer=1", "--dry-run")[0] == 0


def test_a_misspelt_allow_change_names_the_nearest_setting(dataset: Path, tmp_path: Path) -> None:
    arguments = (f"data.path={dataset}", f"directory={tmp_path}", "--allow-change", "optimizer.lrr")
    code, output = run_txl("train", TINY, *arguments)
    assert code == 2
    assert "did you mean optimizer.lr?" in output


@pytest.mark.fault_row(35)
def test_a_directory_in_use_is_refused_and_its_run_not_disturbed(
    dataset: Path, tmp_path: Path
) -> None:
    from txl_dist.training.spec import RunDirectory

    directory = RunDirectory(tmp_path)
    directory.create()
    arguments = (f"data.path={dataset}", f"directory={tmp_path}", "--on", "processes")
    with directory.locked():
        before = sorted(path.name for path in tmp_path.rglob("*"))
        code, output = run_txl("train", TINY, *arguments)
        assert code == 2
        assert "in use by another run" in output
        assert sorted(path.name for path in tmp_path.rglob("*")) == before


@pytest.mark.fault_row(12)
def test_a_run_directory_that_cannot_be_written_is_refused_first(
    dataset: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    arguments = (f"data.path={dataset}", f"directory={tmp_path / 'file' / 'run'}")
    code, output = run_txl("train", TINY, *arguments, "--on", "processes")
    assert code == 2
    assert "directory=PATH" in output


@pytest.mark.fault_row(26)
def test_a_checkpoint_of_another_model_ends_training_with_4(dataset: Path, run: Path) -> None:
    arguments = (f"data.path={dataset}", f"directory={run}", "model.d_inner=48")
    code, output = run_txl("train", TINY, *arguments, "--on", "processes", "--ranks", 1)
    assert code == 4
    assert "model.d_inner: checkpoint 32, now 48" in output


def test_torchrun_trains_too(dataset: Path, tmp_path: Path) -> None:
    arguments = (f"data.path={dataset}", f"directory={tmp_path}", "evaluation.split=null")
    launch = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", 2)
    command = ["torch.distributed.run", *launch, "-m", "txl_dist", "train", TINY, *arguments]
    ended = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
    )
    assert ended.returncode == 0, ended.stderr
    assert "step 20 | loss" in ended.stdout
    assert (tmp_path / "checkpoints" / "step-00000020").is_dir()
