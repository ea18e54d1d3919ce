"""What makes a stop request true, and when it ends the process: at once, late, or not at all."""

import errno
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.commands import wait_until
from txl_dist.checkpoint.directory import CheckpointDirectory, resume_advice
from txl_dist.runtime import stop as module
from txl_dist.runtime.process import Activity
from txl_dist.runtime.stop import StopDeadline, StopRequest
from txl_dist.training.rank import describe_loss

LONG_SECONDS = 1000.0


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Replaces the end of the process."""
    ended = threading.Event()
    monkeypatch.setattr(module, "end_now", ended.set)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    return ended


def deadline(run: Path, *, grace_seconds: float, num_steps: int = 0) -> StopDeadline:
    """Of a process that has done `num_steps` steps."""
    return StopDeadline(
        StopRequest(stop_file=run / "stop"),
        Activity("checkpoint of step 9", num_steps=num_steps),
        describe_loss=partial(describe_loss, 9, CheckpointDirectory(run), num_done=num_steps),
        advice=partial(resume_advice, run),
        grace_seconds=grace_seconds,
    )


def test_before_a_step_is_completed_a_request_ends_the_process_at_once(
    tmp_path: Path, ended: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    with deadline(tmp_path, grace_seconds=LONG_SECONDS):
        (tmp_path / "stop").touch()
        assert ended.wait(5)
    assert "before the first step; nothing is lost" in caplog.messages[0]


def test_later_it_ends_the_process_after_the_grace_period_and_says_what_is_lost(
    tmp_path: Path, ended: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    CheckpointDirectory(tmp_path).at(4).mkdir(parents=True)
    # Resumed at step 9, went back to an earlier one, and is at step 9 again.
    with deadline(tmp_path, grace_seconds=0.05, num_steps=12):
        (tmp_path / "stop").touch()
        assert ended.wait(5)
    (message,) = caplog.messages
    assert "training.grace_seconds=0.05" in message
    assert (
        "busy with: checkpoint of step 9; the 5 steps since the checkpoint of step 4 are" in message
    )
    assert "resumes from the newest checkpoint, that of step 4" in message


def test_steps_of_a_process_without_a_checkpoint_are_counted_from_its_start(tmp_path: Path) -> None:
    """A fork does not begin at step 0."""
    lost = describe_loss(1005, CheckpointDirectory(tmp_path), num_done=5)
    assert lost == "the 5 steps since the start are lost"


def test_a_run_that_stops_in_time_is_left_alone(tmp_path: Path, ended: threading.Event) -> None:
    with deadline(tmp_path, grace_seconds=LONG_SECONDS, num_steps=1) as watched:
        (tmp_path / "stop").touch()
        wait_until(lambda: bool(watched._stop))
    assert not ended.is_set()


def test_a_report_that_blocks_does_not_keep_the_process(
    tmp_path: Path, ended: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that does not respond."""
    monkeypatch.setattr(module, "REPORT_SECONDS", 0.05)
    never = threading.Event()
    monkeypatch.setattr(module.log, "warning", lambda *_: never.wait(60))
    with deadline(tmp_path, grace_seconds=LONG_SECONDS):
        (tmp_path / "stop").touch()
        assert ended.wait(5)
    never.set()


def test_a_shared_request_reaches_the_ranks_with_the_same_file(tmp_path: Path) -> None:
    other = StopRequest(stop_file=tmp_path / "stop")
    assert not other
    StopRequest(stop_file=tmp_path / "stop").share()
    wait_until(lambda: bool(other))
    StopRequest().share()  # nothing to share it through


def test_a_file_server_that_fails_for_a_moment_has_not_asked_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FILE_SECONDS", 0.0)
    stop, failures = StopRequest(stop_file=tmp_path / "stop"), [errno.ESTALE, errno.EIO]
    exists = Path.exists

    def fails_at_first(path: Path) -> bool:
        if failures:
            raise OSError(failures.pop(), "failed")
        return exists(path)

    monkeypatch.setattr(Path, "exists", fails_at_first)
    assert not stop
    assert not stop
    assert not failures
    stop.share()
    assert stop


def test_every_look_at_the_file_is_a_request_to_the_server_and_rare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, looks = StopRequest(stop_file=tmp_path / "stop"), []

    def exists(path: Path) -> bool:
        looks.append(path)
        return False

    monkeypatch.setattr(Path, "exists", exists)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=iter(range(1, 20)).__next__))
    monkeypatch.setattr(module, "FILE_SECONDS", 2.5)
    assert not any(stop for _ in range(6))
    assert 2 <= len(looks) <= 3
