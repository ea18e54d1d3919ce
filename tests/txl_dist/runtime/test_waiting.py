"""A rank that waits long for the other ranks logs a warning with the name of the collective."""

import logging
import re
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

from tests.support.commands import wait_until
from tests.support.gloo_ranks import RankGroups
from txl_dist.runtime import waiting
from txl_dist.runtime.activity import Activity, Heartbeat, Span, read_heartbeats
from txl_dist.runtime.waiting import (
    GPU_WAIT,
    CollectiveWatch,
    collective_name,
    frames_of,
    innermost_calls,
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


@pytest.mark.parametrize(
    ("frames", "name"),
    [
        ([("txl_dist/runtime/world.py", 1, "all_gather")], None),
        ([], None),
        (
            [
                ("txl_dist/runtime/world.py", 1, "all_gather"),
                ("site-packages/torch/distributed/distributed_c10d.py", 1, "all_gather_object"),
                ("site-packages/torch/distributed/distributed_c10d.py", 1, "all_gather"),
            ],
            "all_gather_object",
        ),
    ],
)
def test_a_stack_names_its_outermost_collective(
    frames: list[tuple[str, int, str]], name: str | None
) -> None:
    assert collective_name(frames) == name


def test_the_watch_ends_with_its_context(tmp_path: Path) -> None:
    before: list[Any] = threading.enumerate()
    with CollectiveWatch(World(0, 1), run=tmp_path, limit_seconds=1):
        assert len(threading.enumerate()) == len(before) + 1
    assert threading.enumerate() == before


def test_a_long_evaluation_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 says how far it is; nothing else is repeated."""
    monkeypatch.setattr(waiting, "EVALUATION_SECONDS", 0.01)
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
