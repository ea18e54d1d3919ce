"""StopRequest: what makes it true."""

from pathlib import Path

from txl_dist.runtime.stop_request import StopRequest


def test_a_stop_file_is_a_request_too(tmp_path: Path) -> None:
    stop = StopRequest(stop_file=tmp_path / "stop")
    assert not stop
    (tmp_path / "stop").touch()
    assert stop
