"""One rank from start to exit, and its end in time after a stop request."""

import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.commands import wait_until
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, losses, metrics, tiny_job, train
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.errors import PreemptedError
from txl_dist.runtime.activity import Activity
from txl_dist.runtime.stop_request import StopRequest
from txl_dist.runtime.world import World
from txl_dist.training import rank
from txl_dist.training.job import TrainJob
from txl_dist.training.rank import StopDeadline

# A clock that jumps and a full log do not change a run; a run directory contains no secrets.


@pytest.fixture(scope="module")
def undisturbed(ranks: RankGroups, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed")
    assert ranks(1).run(train, tiny_job(dataset, run, NO_EVALUATION)) == [0]
    return run


def train_while_the_clock_runs_backwards(world: World, job: TrainJob) -> int:
    with pytest.MonkeyPatch.context() as patch:
        clock = iter(range(2_000_000_000, 0, -3600))
        patch.setattr(time, "time", lambda: float(next(clock)))
        return train(world, job)


@pytest.mark.fault_row(34)
def test_a_clock_that_jumps_back_changes_no_duration_and_no_order(
    ranks: RankGroups, dataset: Path, undisturbed: Path, tmp_path: Path
) -> None:
    job = tiny_job(dataset, tmp_path, NO_EVALUATION)
    assert ranks(1).run(train_while_the_clock_runs_backwards, job) == [0]
    assert losses(tmp_path) == losses(undisturbed)
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert all(line["time"] > later["time"] for line, later in pairwise(lines))
    assert all(line["tokens_per_second"] > 0 and 0 <= line["data_wait"] <= 1 for line in lines)


@pytest.mark.fault_row(42)
def test_a_log_on_a_full_disk_does_not_stop_training(
    ranks: RankGroups, dataset: Path, undisturbed: Path, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").symlink_to("/dev/full")
    assert ranks(1).run(train, tiny_job(dataset, tmp_path, NO_EVALUATION)) == [0]
    assert losses(tmp_path) == losses(undisturbed)


@pytest.mark.fault_row(44)
def test_no_secret_of_a_config_is_written_to_the_run_directory(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    """The resolved config, the manifests of checkpoints and the logs do not contain it."""
    secrets = ("tracking.uri=http://me:CANARY@127.0.0.1:1?token=CANARY", "training.num_steps=6")
    job = tiny_job(dataset, tmp_path, NO_EVALUATION, *secrets)
    assert ranks(1).run(train, job) == [0]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.yaml", "manifest.json", "rank-0.log"} <= {path.name for path in files}
    assert [path for path in files if b"CANARY" in path.read_bytes()] == []


# When a stop request ends the process: at once, after the grace period, or not at all.


LONG_SECONDS = 1000.0


class Ends:
    """Replaces the end of the process by an event."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: list[PreemptedError] = []
        self.ended = threading.Event()
        monkeypatch.setattr(rank, "end_now", self.ended.set)
        monkeypatch.setattr(rank, "POLL_SECONDS", 0.01)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    return Ends(monkeypatch)


def deadline(run: Path, ends: Ends, *, grace_seconds: float, num_steps: int = 0) -> StopDeadline:
    """Of a process that has done `num_steps` steps."""
    return StopDeadline(
        StopRequest(stop_file=run / "stop"),
        Activity("checkpoint of step 9", num_steps=num_steps),
        run=run,
        grace_seconds=grace_seconds,
        report=ends.errors.append,
    )


@pytest.mark.parametrize("is_in_start_up", [True, False])
def test_before_a_step_is_completed_a_request_ends_the_process_at_once(
    is_in_start_up: bool, tmp_path: Path, ends: Ends
) -> None:
    with deadline(tmp_path, ends, grace_seconds=LONG_SECONDS) as watched:
        if not is_in_start_up:
            watched.begin_steps(lambda: 9)  # resumed at step 9, and in step 10
        (tmp_path / "stop").touch()
        assert ends.ended.wait(5)
    assert "before the first step; nothing is lost" in str(ends.errors[0])


def test_later_it_ends_the_process_after_the_grace_period_and_says_what_is_lost(
    tmp_path: Path, ends: Ends
) -> None:
    CheckpointDirectory(tmp_path).at(4).mkdir(parents=True)
    # Resumed at step 9, went back to an earlier one, and is at step 9 again.
    with deadline(tmp_path, ends, grace_seconds=0.05, num_steps=12) as watched:
        watched.begin_steps(lambda: 9)
        (tmp_path / "stop").touch()
        assert ends.ended.wait(5)
    message = str(ends.errors[0])
    assert "training.grace_seconds=0.05" in message
    assert (
        "busy with: checkpoint of step 9; the 5 steps since the checkpoint of step 4 are" in message
    )
    assert "resumes from the newest checkpoint, that of step 4" in message


def test_a_run_that_stops_in_time_is_left_alone(tmp_path: Path, ends: Ends) -> None:
    with deadline(tmp_path, ends, grace_seconds=LONG_SECONDS, num_steps=1) as watched:
        watched.begin_steps(lambda: 1)
        (tmp_path / "stop").touch()
        wait_until(lambda: bool(watched._stop))
    assert not ends.ended.is_set()


def test_a_report_that_blocks_does_not_keep_the_process(
    tmp_path: Path, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that does not respond."""
    monkeypatch.setattr(rank, "REPORT_SECONDS", 0.05)
    never = threading.Event()
    watched = deadline(tmp_path, ends, grace_seconds=LONG_SECONDS)
    watched._report = lambda error: never.wait(60) and None
    with watched:
        (tmp_path / "stop").touch()
        assert ends.ended.wait(5)
    never.set()
