"""StopRequest: what makes it true."""

from pathlib import Path

from txl_dist.runtime.stop_request import StopRequest


def test_a_stop_file_is_a_request_too(tmp_path: Path) -> None:
    stop = StopRequest(stop_file=tmp_path / "stop")
    assert not stop
    (tmp_path / "stop").touch()
    assert stop


def test_a_shared_request_reaches_the_ranks_with_the_same_file(tmp_path: Path) -> None:
    other = StopRequest(stop_file=tmp_path / "stop")
    StopRequest(stop_file=tmp_path / "stop").share()
    assert other
    StopRequest().share()  # nothing to share it through
