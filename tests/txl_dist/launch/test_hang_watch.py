"""HangWatch: silent only after a heartbeat of this launch, and as long as none changes."""

import time
from pathlib import Path

from tests.support.commands import wait_until
from txl_dist.launch.hang_watch import HangWatch
from txl_dist.runtime.heartbeat import Heartbeat, HeartbeatFiles

POLL_SECONDS = 0.02


def write(run: Path, rank: int, *, number: int, begin: float) -> None:
    beat = Heartbeat(
        rank=rank, host="a", pid=42, number=number, time=begin, activity="step 7", span="forward",
        collective=None, seconds=0.0, stack=(),
    )  # fmt: skip
    HeartbeatFiles(run, rank=rank).write(beat)


def test_ranks_are_silent_when_none_of_them_changes_its_heartbeat(tmp_path: Path) -> None:
    write(tmp_path, 0, number=9, begin=time.time() - 60)  # left by a killed process
    with HangWatch(tmp_path, num_ranks=2, poll_seconds=POLL_SECONDS) as watch:
        time.sleep(10 * POLL_SECONDS)
        assert watch.silent_seconds == 0, "the ranks may take long to start"
        write(tmp_path, 0, number=1, begin=time.time())
        write(tmp_path, 1, number=1, begin=time.time())
        wait_until(lambda: watch.silent_seconds > 5 * POLL_SECONDS)
        assert watch.describe() == (
            "rank 0 (host a, pid 42) in step 7, forward; rank 1 (host a, pid 42) in step 7, forward"
        )
        write(tmp_path, 1, number=2, begin=time.time())
        wait_until(lambda: watch.silent_seconds < 2 * POLL_SECONDS)
