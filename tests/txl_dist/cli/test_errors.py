"""How errors reach the user."""

from pathlib import Path

from tests.support.commands import txl


def test_an_error_goes_to_standard_error_with_its_exit_code(tmp_path: Path) -> None:
    ended = txl("eval", tmp_path / "nowhere", tmp_path, "--json")
    assert ended.returncode == 4
    assert ended.stdout == ""
    assert ended.stderr.startswith("CheckpointError: ")
