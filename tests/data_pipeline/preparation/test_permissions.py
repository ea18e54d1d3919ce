"""An output that is not writable exits with 2 at the start. An unreadable shard is not damaged."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.shards.manifest import ShardManifest
from tests.support.commands import ENVIRONMENT

Txl = Callable[..., Any]


def as_a_user(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a command without root's right to write everywhere."""
    command = [sys.executable, "-m", "txl_dist", *map(str, words)]
    if os.geteuid() == 0:
        if not shutil.which("setpriv"):
            pytest.skip("root may write everywhere, and setpriv is not installed")
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("file", "is a file"),
        ("file/below", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("/proc/txl", "No such file"),
    ],
    ids=["file", "below a file", "too long", "no place for files"],
)
def test_prepare_refuses_an_impossible_output_path(
    txl: Txl, corpus: Path, tmp_path: Path, place: str, reason: str
) -> None:
    (tmp_path / "file").write_text("mine")
    ended = txl("prepare", corpus, "--out", tmp_path / place)
    assert ended.code == 2, ended.err
    assert str(tmp_path / place) in ended.err
    assert reason in ended.err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.fault_row(12)
def test_a_read_only_directory_is_refused_before_anything_is_read(
    corpus: Path, tmp_path: Path
) -> None:
    place = tmp_path / "locked"
    place.mkdir(mode=0o555)
    for out in (place, place / "new"):
        ended = as_a_user("prepare", corpus, "--out", out)
        assert ended.returncode == 2, ended.stderr
        assert str(out) in ended.stderr
        assert "Permission denied" in ended.stderr
    assert list(place.iterdir()) == []


def test_a_config_in_the_folder_of_another_user_is_an_error_with_its_path(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    ended = as_a_user("config", "init", tmp_path / "mine")
    tmp_path.chmod(0o755)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"TxlError: {tmp_path}/mine.yaml: Permission denied. ")
    assert ended.stderr.count("\n") == 1


def test_a_complete_dataset_in_a_read_only_directory_is_reused(
    txl: Txl, corpus: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "data"
    assert txl("prepare", corpus, "--out", directory).code == 0
    directory.chmod(0o555)
    ended = as_a_user("prepare", corpus, "--out", directory)
    assert ended.returncode == 0, ended.stderr
    assert "already complete" in ended.stdout


def test_a_shard_without_read_permission_is_not_reported_as_damaged(
    dataset: tuple[Path, ShardManifest],
) -> None:
    directory, _ = dataset
    (directory / "train-000001.tar.zst").chmod(0)
    (directory / "train-000002.index.safetensors").chmod(0)
    ended = as_a_user("data", "verify", directory)
    assert ended.returncode == 1, ended.stderr
    assert "2 could not be read now:\n  train-000001.tar.zst: cannot be read: Perm" in ended.stderr
    assert "Check the disk and the permissions" in ended.stderr
    assert "Restore" not in ended.stderr
