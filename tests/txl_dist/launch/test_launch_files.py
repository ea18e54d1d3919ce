"""Launcher and ranks communicate through files of the run directory."""

from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.system.files import is_locked
from txl_dist.launch.launch_files import LaunchFiles


@pytest.fixture
def files(tmp_path: Path) -> LaunchFiles:
    return LaunchFiles(tmp_path, "0123")


def test_the_error_of_a_rank_is_read_with_its_type(files: LaunchFiles) -> None:
    assert files.error(9) is None
    files.write_error(9, DataError("of rank 9"))
    error = files.error(9)
    assert isinstance(error, DataError)
    assert str(error) == "of rank 9"
    assert files.error(0) is None


def test_a_new_start_of_ranks_finds_no_request_or_error_of_the_last(files: LaunchFiles) -> None:
    files.stop.touch()
    files.saved.touch()
    files.write_error(0, DataError("text"))
    files.reset()
    assert not files.stop.exists()
    assert files.error(0) is None
    assert files.saved.exists(), "restarted ranks resume from the checkpoints of this launch"


def test_a_launch_removes_its_own_files_and_no_others(files: LaunchFiles, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "my.launch-notes.txt", ".launch-01234.stop"):
        (tmp_path / name).touch()
    others = set(tmp_path.iterdir())
    with files.held():
        files.stop.touch()
        files.saved.touch()
        files.write_error(0, DataError("text"))
        (tmp_path / "..launch-0123.error-0.123.tmp").touch()  # of a killed rank
        with LaunchFiles(tmp_path, "other").held():
            pass
        assert files.stop.exists()
        assert is_locked(tmp_path / ".launch-0123.launcher"), "how txl status finds the launcher"
    assert set(tmp_path.iterdir()) == others
