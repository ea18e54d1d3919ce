"""Launcher and ranks communicate through files of the run directory."""

from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from txl_dist.launch.launch_files import LaunchFiles, RankLocation


@pytest.fixture
def files(tmp_path: Path) -> LaunchFiles:
    return LaunchFiles(tmp_path, "0123")


def test_the_error_of_the_lowest_rank_is_read_with_its_type(files: LaunchFiles) -> None:
    assert files.error() is None
    files.write_error(10, DataError("of rank 10"))
    files.write_error(9, DataError("of rank 9"))
    error = files.error()
    assert isinstance(error, DataError)
    assert str(error) == "of rank 9"


def test_locations_are_those_of_the_ranks_that_have_started(files: LaunchFiles) -> None:
    location = RankLocation("node", "10.0.0.1", 7)
    files.write_location(1, location)
    assert files.locations(2) == {1: location}
    files.remove_locations()
    assert files.locations(2) == {}


def test_a_new_start_of_ranks_finds_no_request_error_or_location_of_the_last(
    files: LaunchFiles,
) -> None:
    files.stop.touch()
    files.saved.touch()
    files.write_error(0, DataError("text"))
    files.write_location(0, RankLocation("node", "10.0.0.1", 7))
    files.reset()
    assert not files.stop.exists()
    assert files.error() is None
    assert files.locations(1) == {}
    assert files.saved.exists(), "restarted ranks resume from the checkpoints of this launch"


def test_a_failure_is_read_once(files: LaunchFiles) -> None:
    assert files.new_failures() == []
    files.append_failure({0: ValueError(), 1: ValueError("text")}, died=(1,))
    [failure] = files.new_failures()
    assert failure.died == (1,)
    assert failure.errors == {0: "ValueError()", 1: "text"}
    assert files.new_failures() == []


def test_the_files_of_every_launch_are_removed_with_temporary_ones(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "my.launch-notes.txt"):
        (tmp_path / name).touch()
    for launch_id in "ab":
        files = LaunchFiles(tmp_path, launch_id)
        files.stop.touch()
        files.write_error(0, DataError("text"))
    (tmp_path / "..launch-a.error-00000.123.tmp").touch()  # write_file of a killed rank
    LaunchFiles(tmp_path, "a").remove()
    assert LaunchFiles(tmp_path, "b").stop.exists()
    LaunchFiles.remove_all(tmp_path)
    remaining = sorted(path.name for path in tmp_path.iterdir())
    assert remaining == ["metrics.jsonl", "my.launch-notes.txt"]
