"""Heartbeats name the rank that others wait for, and show a launcher when all ranks hang."""

import shutil
import time
from pathlib import Path

import pytest

from tests.support.commands import wait_until
from txl_dist.runtime import heartbeat
from txl_dist.runtime.heartbeat import (
    MAX_NAMED,
    NUM_READERS,
    HangWatch,
    Heartbeat,
    HeartbeatFile,
    Peers,
    read_heartbeats,
)
from txl_dist.runtime.waiting import innermost_calls

BEAT_SECONDS = 5.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def beat(rank: int, number: int, *, collective: str | None = None, pid: int = 70) -> Heartbeat:
    return Heartbeat(
        rank=rank,
        host="a",
        pid=pid + rank,
        number=number,
        time=1e9 - number,  # a wall clock that runs backwards has no effect
        activity="step 12",
        span="data wait",
        collective=collective,
        seconds=6.0,
        stack=("txl_dist/training/loop.py:7 in _next_segment",),
    )


def write(run: Path, *beats: Heartbeat) -> None:
    for each in beats:
        HeartbeatFile(run, rank=each.rank).write(each)


def peers_of(run: Path, *, rank: int = 0, num_ranks: int = 3) -> Peers:
    return Peers(run, rank=rank, num_ranks=num_ranks, beat_seconds=BEAT_SECONDS)


def test_a_rank_whose_heartbeat_stops_is_named_and_not_the_busy_one(
    tmp_path: Path, clock: list[float]
) -> None:
    peers = peers_of(tmp_path)
    for number in range(5):
        write(tmp_path, beat(1, number), beat(2, 9, collective="all_reduce"))
        peers.read("step 12")
        clock[0] += BEAT_SECONDS
    assert peers.describe("step 12") == (
        "rank 2 (host a, pid 72) has not responded for 20 s (last in step 12, data wait)"
    )


def test_a_busy_rank_is_named_with_its_work_and_never_as_silent(
    tmp_path: Path, clock: list[float]
) -> None:
    peers = peers_of(tmp_path)
    for number in range(100):
        write(tmp_path, beat(1, number), beat(2, number, collective="all_reduce"))
        peers.read("step 12")
        clock[0] += 2 * BEAT_SECONDS
        assert peers.describe("step 12") == (
            "rank 1 (host a, pid 71) has been in step 12, data wait for 6 s: "
            "txl_dist/training/loop.py:7 in _next_segment"
        )


def test_a_restarted_rank_responds_even_if_its_number_is_the_same(
    tmp_path: Path, clock: list[float]
) -> None:
    peers = peers_of(tmp_path, num_ranks=2)
    for pid in range(10):
        write(tmp_path, beat(1, 1, pid=pid))
        peers.read("step 12")
        clock[0] += 2 * BEAT_SECONDS
    assert "has not responded" not in peers.describe("step 12")


def test_without_a_rank_outside_of_collectives_all_are_listed(tmp_path: Path) -> None:
    write(tmp_path, beat(1, 1, collective="all_reduce"), beat(2, 1, collective="barrier"))
    peers = peers_of(tmp_path)
    peers.read("step 12")
    text = peers.describe("step 12")
    assert "rank 1 in all_reduce" in text
    assert "rank 2 in barrier" in text


def test_what_was_read_in_another_activity_is_not_reported(tmp_path: Path) -> None:
    """A rank that is killed later must not be described by an old heartbeat."""
    write(tmp_path, beat(1, 1))
    peers = peers_of(tmp_path, num_ranks=2)
    assert peers.describe("step 12") == ""
    peers.read("step 12")
    assert peers.describe("step 13") == ""


@pytest.mark.parametrize("content", [None, b"", b'{"rank": 1', b"[1]", b"\xff\xfe"])
def test_a_missing_or_damaged_heartbeat_is_no_error(tmp_path: Path, content: bytes | None) -> None:
    peers = peers_of(tmp_path, num_ranks=2)
    if content is not None:
        (tmp_path / ".heartbeats").mkdir()
        (tmp_path / ".heartbeats" / "rank-1.json").write_bytes(content)
    peers.read("step 12")
    assert peers.describe("step 12") == "rank 1 has no heartbeat"


def test_messages_and_reads_are_bounded_for_many_ranks(tmp_path: Path) -> None:
    first = peers_of(tmp_path, num_ranks=40)
    first.read("step 12")
    assert first.describe("step 12").endswith(f"and {39 - MAX_NAMED} more ranks")
    last = peers_of(tmp_path, rank=39, num_ranks=40)
    last.read("step 12")
    assert last.describe("step 12").endswith(f"and {NUM_READERS - MAX_NAMED} more ranks")


def test_a_run_directory_that_cannot_be_written_has_no_effect() -> None:
    run = Path("/dev/null/run")
    file = HeartbeatFile(run, rank=0)
    file.write(beat(0, 1))
    file.remove()
    assert read_heartbeats(run) == {}


def test_the_innermost_calls_are_those_of_this_project() -> None:
    root = str(Path(__file__).parents[3])
    frames = [
        (f"{root}/txl_dist/training/loop.py", 5, "_train"),
        (f"{root}/data_pipeline/streams/x.py", 7, "read"),
        ("/usr/lib/python3/cluster/queue.py", 9, "get"),
    ]
    assert innermost_calls(frames) == (
        "data_pipeline/streams/x.py:7 in read",
        "txl_dist/training/loop.py:5 in _train",
    )


POLL_SECONDS = 0.02


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "MARGIN_SECONDS", 0.0)
    monkeypatch.setattr(heartbeat, "START_SECONDS", 50 * POLL_SECONDS)


def write_beat(run: Path, rank: int, *, number: int) -> None:
    beat = Heartbeat(
        rank=rank, host="a", pid=42, number=number, time=time.time(), activity="step 7",
        span="forward", collective=None, seconds=0.0, stack=(),
    )  # fmt: skip
    HeartbeatFile(run, rank=rank).write(beat)


@pytest.mark.usefixtures("short_limits")
def test_ranks_hang_when_none_of_them_changes_its_heartbeat(tmp_path: Path) -> None:
    write_beat(tmp_path, 0, number=9)  # left by a killed process
    limit_seconds = 5 * POLL_SECONDS
    with HangWatch(tmp_path, poll_seconds=POLL_SECONDS) as watch:
        time.sleep(10 * POLL_SECONDS)
        assert watch.hang(timeout_seconds=limit_seconds) is None, "they may take longer to start"
        for rank in (0, 1):
            write_beat(tmp_path, rank, number=1)
        wait_until(lambda: watch.hang(timeout_seconds=limit_seconds) is not None)
        hang = watch.hang(timeout_seconds=limit_seconds)
        assert hang is not None
        assert hang.endswith(
            "rank 0 (host a, pid 42) in step 7, forward; rank 1 (host a, pid 42) in step 7, forward"
        )
        shutil.rmtree(tmp_path / ".heartbeats")  # by somebody who cleans up
        write_beat(tmp_path, 1, number=2)
        wait_until(lambda: watch.hang(timeout_seconds=limit_seconds) is None)


@pytest.mark.usefixtures("short_limits")
def test_ranks_that_never_begin_hang(tmp_path: Path) -> None:
    write_beat(tmp_path, 0, number=9)  # left by a killed process
    with HangWatch(tmp_path, poll_seconds=POLL_SECONDS) as watch:
        wait_until(lambda: watch.hang(timeout_seconds=0.0) == "no rank has begun within 1 s")
