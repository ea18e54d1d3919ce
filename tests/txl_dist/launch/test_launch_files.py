"""Launcher and ranks communicate through files of the run directory."""

import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from tests.support.training_runs import tiny_job
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


@pytest.mark.parametrize("resume", ["never", "step-00000003"])
def test_restarted_ranks_resume_once_this_launch_has_saved(tmp_path: Path, resume: str) -> None:
    """Before that, `find_resume_point` knows what the launch has begun."""
    job = tiny_job(tmp_path / "data", tmp_path).model_copy(update={"resume": resume})
    files = LaunchFiles(tmp_path, "0123")
    assert files.job_after_restart(job).resume == resume
    files.saved.touch()
    assert files.job_after_restart(job).resume == "auto"


def test_a_launch_removes_its_own_files_and_those_of_dead_launches(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "my.launch-notes.txt"):
        (tmp_path / name).touch()

    def write(launch_id: str) -> None:
        files = LaunchFiles(tmp_path, launch_id)
        files.stop.touch()
        files.write_error(0, DataError("text"))
        (tmp_path / f"..launch-{launch_id}.error-0.123.tmp").touch()  # of a killed rank

    (tmp_path / ".launch-dead.launcher").touch()  # without a lock
    write("dead")
    with LaunchFiles(tmp_path, "b").held():
        write("b")
        running = {path.name for path in tmp_path.iterdir()}
        assert not any("dead" in name for name in running)
        with LaunchFiles(tmp_path, "a").held():
            write("a")
        assert {path.name for path in tmp_path.iterdir()} == running
    remaining = sorted(path.name for path in tmp_path.iterdir())
    assert remaining == ["metrics.jsonl", "my.launch-notes.txt"]


def test_a_launch_of_another_process_leaves_the_files(files: LaunchFiles, tmp_path: Path) -> None:
    with files.held():
        files.stop.touch()
        files.saved.touch()
        program = (
            "from pathlib import Path; import sys; "
            "from txl_dist.launch.launch_files import LaunchFiles\n"
            "with LaunchFiles(Path(sys.argv[1]), 'other').held(): pass"
        )
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
        assert files.stop.exists()
        assert files.saved.exists()
    assert not files.stop.exists()
