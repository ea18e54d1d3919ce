"""Files of the tracking processes: damage is read as absence, never as an error in training."""

from pathlib import Path

import pytest

from txl_dist.tracking.tracker import TrackingState


@pytest.mark.parametrize("content", ["", "{", "null", "[1]", "{}", "[" * 10**5])
def test_a_damaged_file_is_read_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tracking.json"
    path.write_text(content)
    assert TrackingState.load(path) is None
