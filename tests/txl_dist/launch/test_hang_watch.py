"""HangWatch: ranks hang if none of them changes its heartbeat, or none ever has one."""

import shutil
import time
from pathlib import Path

import pytest

from tests.support.commands import wait_until
from txl_dist.launch import hang_watch
from txl_dist.launch.hang_watch import HangWatch
from txl_dist.runtime.heartbeat import Heartbeat, HeartbeatFiles

POLL_SECONDS = 0.02


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "MARGIN_SECONDS", 0.0)
    monkeypatch.setattr(hang_watch, "START_SECONDS", 50 * POLL_SECONDS)


def write(files: HeartbeatFiles, rank: int, *, number: int) -> None:
    beat = Heartbeat(
        rank=rank, host="a", pid=42, number=number, time=time.time(), activity="step 7",
        span="forward", collective=None, seconds=0.0, stack=(),
    )  # fmt: skip
    files.write(beat)


def test_ranks_hang_when_none_of_them_changes_its_heartbeat(tmp_path: Path) -> None:
    files = [HeartbeatFiles(tmp_path, rank=rank) for rank in (0, 1)]
    write(files[0], 0, number=9)  # left by a killed process
    limit_seconds = 5 * POLL_SECONDS
    with HangWatch(tmp_path, num_ranks=2, poll_seconds=POLL_SECONDS) as watch:
        time.sleep(10 * POLL_SECONDS)
        assert watch.hang(timeout_seconds=limit_seconds) is None, "they may take longer to start"
        for rank in (0, 1):
            write(files[rank], rank, number=1)
        wait_until(lambda: watch.hang(timeout_seconds=limit_seconds) is not None)
        hang = watch.hang(timeout_seconds=limit_seconds)
        assert hang is not None
        assert hang.endswith(
            "rank 0 (host a, pid 42) in step 7, forward; rank 1 (host a, pid 42) in step 7, forward"
        )
        shutil.rmtree(tmp_path / ".heartbeats")  # by somebody who cleans up
        write(files[1], 1, number=2)
        wait_until(lambda: watch.hang(timeout_seconds=limit_seconds) is None)


def test_ranks_that_never_begin_hang(tmp_path: Path) -> None:
    write(HeartbeatFiles(tmp_path, rank=0), 0, number=9)  # left by a killed process
    with HangWatch(tmp_path, num_ranks=2, poll_seconds=POLL_SECONDS) as watch:
        wait_until(lambda: watch.hang(timeout_seconds=0.0) == "no rank has begun within 1 s")
