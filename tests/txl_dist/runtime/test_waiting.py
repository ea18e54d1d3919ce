"""A rank that waits long for the other ranks logs the collective and who is late; heartbeats name
the rank that others wait for, and show a launcher when all ranks hang.
"""

import errno
import logging
import re
import shutil
import socket
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.conftest import Clock
from tests.support.commands import wait_until
from tests.support.gloo_ranks import RankGroups
from txl_dist.runtime import waiting as module
from txl_dist.runtime.process import Activity, Span
from txl_dist.runtime.waiting import (
    GPU_WAIT,
    MAX_NAMED,
    NUM_READERS,
    CollectiveWatch,
    HangWatch,
    Heartbeat,
    Peers,
    collective_name,
    frames_of,
    innermost_calls,
    read_heartbeats,
    remove_heartbeat,
    write_heartbeat,
)
from txl_dist.runtime.world import World

NOTICE_SECONDS = 0.4


class Lines(logging.Handler):
    """Collects log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def has_waited(beat: Heartbeat | None) -> bool:
    return beat is not None and beat.collective is not None and beat.seconds > 4 * NOTICE_SECONDS


def wait_for_a_late_rank(world: World, run: Path) -> list[str]:
    """Rank 1 enters a collective when rank 0 has named it; returns the lines of this rank."""
    handler = Lines()
    logger = logging.getLogger("txl_dist.training")
    logger.addHandler(handler)
    world.activity.name = "step 7"
    with CollectiveWatch(world, run=run, limit_seconds=60, notice_seconds=NOTICE_SECONDS):
        if world.rank == 1:
            wait_until(lambda: has_waited(read_heartbeats(run).get(0)))
        world.all_gather(world.rank)
    logger.removeHandler(handler)
    return handler.lines


def test_a_long_wait_is_logged_with_its_collective_and_the_late_rank(
    ranks: RankGroups, tmp_path: Path
) -> None:
    waiting, busy = ranks(2).run(wait_for_a_late_rank, tmp_path)
    assert len(waiting) >= 2
    assert waiting[0].startswith("step 7 | rank 0 has waited ")
    assert "for the other ranks in all_gather_object;" in waiting[0]
    late = rf"; rank 1 \(host {re.escape(socket.gethostname())}, pid \d+\) has been in step 7, "
    assert any(re.search(late, line) for line in waiting)
    assert busy == []
    assert list((tmp_path / ".heartbeats").glob("*rank*")) == [], "they have ended"


def watch(run: Path, activity: str, limit_seconds: float) -> CollectiveWatch:
    world = World(0, 2, activity=Activity(activity))
    return CollectiveWatch(world, run=run, limit_seconds=limit_seconds)


def stop_answering(world: World, run: Path, limit_seconds: float) -> str | None:
    """Rank 1 does not enter a collective of a second group; returns rank 0's error message."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=600))
    with world.timeouts(timeout_seconds=limit_seconds):
        pass
    message = None
    if world.rank == 0:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            message = str(watch(run, "step 3", limit_seconds).lost_rank_error(error))
    else:
        time.sleep(3 * limit_seconds)
    with world.timeouts(timeout_seconds=60):
        pass
    return message


def test_the_limit_reaches_every_group_and_the_error_names_rank_and_collective(
    ranks: RankGroups, tmp_path: Path
) -> None:
    group = ranks(2)
    message, _ = group.run(stop_answering, tmp_path, 1.0)
    group.is_broken = True  # its second process group is
    assert message is not None
    assert message.startswith(
        "rank 0 waited training.rank_timeout_seconds=1 for the other ranks in all_reduce (step 3)"
    )


def test_an_error_outside_a_collective_is_not_a_lost_rank(tmp_path: Path) -> None:
    error = RuntimeError("Connection closed by peer, timed out")
    assert watch(tmp_path, "step 3", 1).lost_rank_error(error) is None


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


def test_on_a_gpu_a_call_that_waits_for_a_result_counts_as_a_collective(tmp_path: Path) -> None:
    source = tmp_path / "step.py"
    source.write_text("loss = nats.sum().item()\nx = load()\n")
    deepspeed = Path(find_spec("deepspeed").origin).parent / "runtime" / "utils.py"
    for path, text, name in (
        (source, ".item()", GPU_WAIT),
        (source, "load()", None),
        (Path(torch.cuda.__file__), "return torch._C._cuda_synchronize()", GPU_WAIT),
        (deepspeed, "err = torch.tensor(-1.0, device=device", GPU_WAIT),
    ):
        lines = path.read_text().splitlines()
        number = next(n for n, line in enumerate(lines, start=1) if text in line)
        frames = [("loop.py", 1, "_train"), (str(path), number, "step")]
        assert collective_name(frames, on_gpu=True) == name
        assert collective_name(frames) is None


def test_a_stack_names_its_outermost_collective() -> None:
    ours, torchs = "txl_dist/runtime/world.py", "torch/distributed/distributed_c10d.py"
    frames = [(ours, 1, "all_gather"), (torchs, 1, "all_gather_object"), (torchs, 1, "all_gather")]
    assert collective_name(frames) == "all_gather_object"
    assert collective_name(frames[:1]) is None
    assert collective_name([]) is None


def test_the_watch_ends_with_its_context(tmp_path: Path) -> None:
    before: list[Any] = threading.enumerate()
    with CollectiveWatch(World(0, 1), run=tmp_path, limit_seconds=1):
        assert len(threading.enumerate()) == len(before) + 1
    assert threading.enumerate() == before


def test_a_long_evaluation_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 says how far it is; nothing else is repeated."""
    monkeypatch.setattr(module, "EVALUATION_SECONDS", 0.01)
    caplog.set_level(logging.INFO)
    activities = [Activity(name="evaluation", span=Span.EVALUATION) for _ in range(2)]
    activities[1].name = "evaluation of rank 1"
    with ExitStack() as stack:
        for rank, activity in enumerate(activities):
            world = World(rank, 2, activity=activity)
            stack.enter_context(CollectiveWatch(world, run=tmp_path, limit_seconds=1.0))
        wait_until(lambda: len(caplog.messages) >= 2)
        activities[0].name = "evaluation, 35% scored"
        wait_until(lambda: activities[0].name in caplog.messages)
        activities[0].name, activities[0].span = "step 3", Span.FORWARD
        time.sleep(0.2)
    assert set(caplog.messages) == {"evaluation", "evaluation, 35% scored"}


def test_a_running_frame_without_a_line_number_is_read() -> None:
    """Python 3.11 gives None for it; the watch of a rank ended with a TypeError."""
    code: Any = SimpleNamespace(co_filename="loop.py", co_name="run")
    frame: Any = SimpleNamespace(f_code=code, f_lineno=None, f_back=None)
    frames = frames_of(frame)
    assert frames == [("loop.py", 0, "run")]
    assert collective_name(frames) is None


# --- heartbeats -----------------------------------------------------------------------------------

BEAT_SECONDS = 5.0


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
    monkeypatch.setattr(module, "HANG_POLL_SECONDS", POLL_SECONDS)
    monkeypatch.setattr(module, "MARGIN_SECONDS", 0.0)
    monkeypatch.setattr(module, "START_SECONDS", 50 * POLL_SECONDS)


@pytest.mark.usefixtures("short_limits")
def test_ranks_hang_when_none_of_them_changes_its_heartbeat(tmp_path: Path) -> None:
    write(tmp_path, beat(0, 9))  # left by a killed process
    limit_seconds = 5 * POLL_SECONDS
    with HangWatch(tmp_path) as watch:
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
    with HangWatch(tmp_path) as watch:
        wait_until(lambda: watch.hang(timeout_seconds=0.0) == "no rank has begun within 1 s")


@pytest.mark.usefixtures("short_limits")
def test_the_watch_survives_a_file_server_that_fails_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, read = [errno.ESTALE, errno.EIO], module.read_heartbeats

    def fails_at_first(run: Path) -> dict[int, Heartbeat]:
        if watch.silent_seconds and failures:
            raise OSError(failures.pop(), "failed")
        return read(run)

    watch = HangWatch(tmp_path)
    monkeypatch.setattr(module, "read_heartbeats", fails_at_first)
    with watch:
        wait_until(lambda: watch.hang(timeout_seconds=0.0) is not None)
    assert not failures
