"""The spans of a rank add up to its time; heartbeats name the rank that others wait for, and show a
launcher when all ranks hang.
"""

import shutil
import time
from pathlib import Path

import pytest

from tests.support.commands import wait_until
from txl_dist.runtime import activity as module
from txl_dist.runtime.activity import (
    MAX_NAMED,
    NUM_READERS,
    STEP_SPANS,
    Activity,
    HangWatch,
    Heartbeat,
    Peers,
    Span,
    read_heartbeats,
    remove_heartbeat,
    write_heartbeat,
)

BEAT_SECONDS = 5.0
START = 100.0


class Clock:
    now = START


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The monotonic clock of this process."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def do(activity: Activity, clock: Clock, *spans: tuple[Span, float]) -> None:
    for span, seconds in spans:
        activity.enter(span)
        clock.now += seconds


def test_nested_spans_are_counted_once(clock: Clock) -> None:
    activity = Activity()
    activity.reset()
    do(activity, clock, (Span.EVALUATION, 5))
    outer = activity.enter(Span.SAVE_WAIT)
    clock.now += 3
    activity.enter(outer)
    clock.now += 2
    seconds = activity.seconds()
    assert (seconds[Span.EVALUATION], seconds[Span.SAVE_WAIT]) == (7, 3)
    assert sum(seconds.values()) == 10


def test_only_the_first_step_is_a_part_of_the_start_up(clock: Clock) -> None:
    activity = Activity()
    activity.reset()
    clock.now += 4
    for number, forward_seconds in ((1, 50), (2, 3), (3, 3)):
        do(activity, clock, (Span.DATA_WAIT, 1), (Span.FORWARD, forward_seconds), (Span.REDUCE, 2))
        activity.end_step()
        assert activity.num_steps == number
    seconds = activity.seconds()
    assert seconds[Span.START_UP] == 4 + 50 + 2
    assert sum(seconds[span] for span in STEP_SPANS) == 2 * (3 + 2)
    assert seconds[Span.DATA_WAIT] == 3
    assert sum(seconds.values()) == clock.now - START

    activity.reset()
    assert (activity.num_steps, sum(activity.seconds().values())) == (0, 0)


# --- heartbeats -----------------------------------------------------------------------------------


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
        write_heartbeat(run, each)


def peers_of(run: Path, *, rank: int = 0, num_ranks: int = 3) -> Peers:
    return Peers(run, rank=rank, num_ranks=num_ranks, beat_seconds=BEAT_SECONDS)


def test_a_rank_whose_heartbeat_stops_is_named_and_not_the_busy_one(
    tmp_path: Path, clock: Clock
) -> None:
    peers = peers_of(tmp_path)
    for number in range(5):
        write(tmp_path, beat(1, number), beat(2, 9, collective="all_reduce"))
        peers.read("step 12")
        clock.now += BEAT_SECONDS
    assert peers.describe("step 12") == (
        "rank 2 (host a, pid 72) has not responded for 20 s (last in step 12, data wait)"
    )


def test_a_busy_rank_is_named_with_its_work_and_never_as_silent(
    tmp_path: Path, clock: Clock
) -> None:
    peers = peers_of(tmp_path)
    for number in range(100):
        write(tmp_path, beat(1, number), beat(2, number, collective="all_reduce"))
        peers.read("step 12")
        clock.now += 2 * BEAT_SECONDS
        assert peers.describe("step 12") == (
            "rank 1 (host a, pid 71) has been in step 12, data wait for 6 s: "
            "txl_dist/training/loop.py:7 in _next_segment"
        )


def test_a_restarted_rank_responds_even_if_its_number_is_the_same(
    tmp_path: Path, clock: Clock
) -> None:
    peers = peers_of(tmp_path, num_ranks=2)
    for pid in range(10):
        write(tmp_path, beat(1, 1, pid=pid))
        peers.read("step 12")
        clock.now += 2 * BEAT_SECONDS
    assert "has not responded" not in peers.describe("step 12")


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
    write_heartbeat(run, beat(0, 1))
    remove_heartbeat(run, 0)
    assert read_heartbeats(run) == {}


POLL_SECONDS = 0.02


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MARGIN_SECONDS", 0.0)
    monkeypatch.setattr(module, "START_SECONDS", 50 * POLL_SECONDS)


@pytest.mark.usefixtures("short_limits")
def test_ranks_hang_when_none_of_them_changes_its_heartbeat(tmp_path: Path) -> None:
    write(tmp_path, beat(0, 9))  # left by a killed process
    limit_seconds = 5 * POLL_SECONDS
    with HangWatch(tmp_path, poll_seconds=POLL_SECONDS) as watch:
        time.sleep(10 * POLL_SECONDS)
        assert watch.hang(timeout_seconds=limit_seconds) is None, "they may take longer to start"
        for rank in (0, 1):
            write(tmp_path, beat(rank, 1))
        wait_until(lambda: watch.hang(timeout_seconds=limit_seconds) is not None)
        hang = watch.hang(timeout_seconds=limit_seconds)
        assert hang is not None
        assert hang.endswith(
            "rank 0 (host a, pid 70) in step 12, data wait; "
            "rank 1 (host a, pid 71) in step 12, data wait"
        )
        shutil.rmtree(tmp_path / ".heartbeats")  # by somebody who cleans up
        write(tmp_path, beat(1, 2))
        wait_until(lambda: watch.hang(timeout_seconds=limit_seconds) is None)


@pytest.mark.usefixtures("short_limits")
def test_ranks_that_never_begin_hang(tmp_path: Path) -> None:
    write(tmp_path, beat(0, 9))  # left by a killed process
    with HangWatch(tmp_path, poll_seconds=POLL_SECONDS) as watch:
        wait_until(lambda: watch.hang(timeout_seconds=0.0) == "no rank has begun within 1 s")
