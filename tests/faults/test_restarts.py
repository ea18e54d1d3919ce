"""FAULTS 1 and 7 under `--max-restarts`: plain processes are restarted as Ray restarts them."""

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.commands import children_of, num_lines, output_of, start_txl, wait_until
from tests.support.training_runs import NO_EVALUATION, losses, train_words
from txl_dist.runtime.waiting import Heartbeat

pytestmark = pytest.mark.fault

SETTINGS = (
    NO_EVALUATION,
    "training.num_steps=200",
    "training.checkpoint_interval_steps=20",
    "training.rank_timeout_seconds=5",
)
ONE_RESTART = ("--max-restarts", 1)


def kill_one(process: subprocess.Popen[str], run: Path, *, at_line: int, number: int) -> None:
    """Signal rank 1 once the run has written `at_line` lines of metrics."""
    wait_until(lambda: num_lines(run / "metrics.jsonl") > at_line)
    os.kill(children_of(process.pid)[1], number)


@pytest.mark.fault_row(1, 7)
def test_killed_and_hung_ranks_are_restarted_with_the_same_losses(
    dataset: Path, straight: Callable[..., Path], tmp_path: Path
) -> None:
    """Two failures and a limit of one: the checkpoints between them reset the count."""
    process = start_txl(*train_words(dataset, tmp_path, *SETTINGS, *ONE_RESTART))
    kill_one(process, tmp_path, at_line=50, number=signal.SIGKILL)
    kill_one(process, tmp_path, at_line=120, number=signal.SIGSTOP)
    output = output_of(process, 0, timeout_seconds=120)
    restarts = re.findall(
        r"^(rank .*); restart (\d) of at most 1 .*, from step (\d+)$", output, re.M
    )
    assert [(event, count) for event, count, _ in restarts] == [
        ("rank 1 was killed by SIGKILL", "1"),
        ("rank 1 hung and was killed", "1"),
    ]
    assert [step for *_, step in restarts] == re.findall(r"resuming at step (\d+) from", output)
    assert "Traceback" not in output, "a lost rank is one line"
    assert losses(tmp_path) == losses(straight(*SETTINGS))
    assert not list(tmp_path.glob(".launch-*"))


@pytest.mark.fault_row(1)
def test_a_checkpoint_that_has_all_files_is_completed_although_a_rank_was_killed(
    dataset: Path, straight: Callable[..., Path], tmp_path: Path
) -> None:
    """In every start: rank 1 is killed 3 steps after the second save, which rank 0 delays.

    Rank 1 waits before, so that its files are complete also on a busy machine.
    """
    fault = "save/manifest:sleep=3:2,step:sleep=1:42:1,step:kill:43:1"
    words = train_words(dataset, tmp_path, *SETTINGS, *ONE_RESTART)
    process = start_txl(*words, environment={"TXL_FAULT": fault})
    output = output_of(process, 0, timeout_seconds=240)
    assert re.findall(r"restart \d of at most 1 .*, from step (\d+)$", output, re.M) == [
        "40", "80", "120", "160",
    ]  # fmt: skip
    assert losses(tmp_path) == losses(straight(*SETTINGS))


@pytest.mark.fault_row(7)
@pytest.mark.parametrize("launcher", ["processes", "ray"])
def test_the_only_rank_of_a_run_is_restarted_when_it_hangs(
    dataset: Path, straight: Callable[..., Path], tmp_path: Path, launcher: str
) -> None:
    """No other rank waits for it."""
    words = train_words(dataset, tmp_path, *SETTINGS, *ONE_RESTART, on=launcher, num_ranks=1)
    process = start_txl(*words)
    wait_until(lambda: num_lines(tmp_path / "metrics.jsonl") > 50)
    beat = Heartbeat.model_validate_json((tmp_path / ".heartbeats" / "rank-0.json").read_bytes())
    os.kill(beat.pid, signal.SIGSTOP)
    output = output_of(process, 0, timeout_seconds=240)
    assert re.search(r"no rank has responded for \d+ s .*; last seen: rank 0 \(host", output)
    assert re.search(r"rank 0 .*hung and was killed; restart 1 of at most 1", output)
    assert losses(tmp_path) == pytest.approx(losses(straight(*SETTINGS)), rel=2e-6)
    assert not psutil.pid_exists(beat.pid)
