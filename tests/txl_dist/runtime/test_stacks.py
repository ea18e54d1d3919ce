"""Stacks of a thread that runs while another thread reads them."""

from types import SimpleNamespace
from typing import Any

from txl_dist.runtime.collective_watch import collective_name
from txl_dist.runtime.stacks import frames_of


def test_a_running_frame_without_a_line_number_is_read() -> None:
    """Python 3.11 gives None for it; the watch of a rank ended with a TypeError."""
    code: Any = SimpleNamespace(co_filename="loop.py", co_name="run")
    frame: Any = SimpleNamespace(f_code=code, f_lineno=None, f_back=None)
    frames = frames_of(frame)
    assert frames == [("loop.py", 0, "run")]
    assert collective_name(frames) is None
