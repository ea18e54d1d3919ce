"""Launcher and ranks communicate through files of the run directory."""

from pathlib import Path

from data_pipeline.system.files import is_locked
from txl_dist.launch.launch_files import LaunchFiles


def test_a_launch_removes_its_own_files_and_no_others(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "my.launch-notes.txt", ".launch-01234.stop"):
        (tmp_path / name).touch()
    others, files = set(tmp_path.iterdir()), LaunchFiles(tmp_path, "0123")
    with files.held():
        files.stop.touch()
        files.saved.touch()
        with LaunchFiles(tmp_path, "other").held():
            pass
        assert files.stop.exists()
        assert is_locked(tmp_path / ".launch-0123.launcher"), "how txl status finds the launcher"
    assert set(tmp_path.iterdir()) == others
