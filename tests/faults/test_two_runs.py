"""Two runs at the same time, on one machine or in one directory, and after a kill."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.commands import children_of, is_alive, num_lines, start_txl, txl, wait_until
from tests.support.training_runs import NO_EVALUATION, TINY, losses
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.reader import verify_checkpoint

pytestmark = pytest.mark.fault
LONG = (NO_EVALUATION, "training.num_steps=50000", "training.checkpoint_interval_steps=20")


def command(dataset: Path, run: Path, *overrides: str, num_ranks: int = 2) -> tuple[object, ...]:
    overrides_of_run = (f"data.path={dataset}", f"directory={run}", *overrides)
    return ("train", TINY, *overrides_of_run, "--on", "processes", "--ranks", num_ranks)


@pytest.mark.fault_row(37)
def test_runs_on_one_machine_do_not_take_each_others_port(dataset: Path, tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("one", "two")]
    processes = [start_txl(*command(dataset, run, NO_EVALUATION)) for run in runs]
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    assert losses(runs[0]) == losses(runs[1])


@pytest.mark.fault_row(35, 36)
def test_the_directory_of_a_living_run_is_refused_and_that_of_a_killed_one_is_not(
    dataset: Path, tmp_path: Path
) -> None:
    first = start_txl(*command(dataset, tmp_path, *LONG))
    wait_until(lambda: num_lines(tmp_path / "metrics.jsonl") > 25)
    ranks = children_of(first.pid)

    second = txl(*command(dataset, tmp_path, *LONG))
    assert second.returncode == 2
    assert "in use by another run (host " in second.stderr
    assert "UTC)" in second.stderr, "since when"
    lines = num_lines(tmp_path / "metrics.jsonl")
    wait_until(lambda: num_lines(tmp_path / "metrics.jsonl") > lines)

    for pid in (first.pid, *ranks):
        os.kill(pid, signal.SIGKILL)
    first.communicate(timeout=60)
    wait_until(lambda: not any(is_alive(rank) for rank in ranks), timeout_seconds=30)
    third = start_txl(*command(dataset, tmp_path, *LONG, num_ranks=1))
    wait_until(lambda: "resuming at step" in log_of(tmp_path))
    third.send_signal(signal.SIGTERM)
    output, _ = third.communicate(timeout=120)
    assert third.returncode == 75, output


@pytest.mark.fault_row(35)
def test_a_forced_start_continues_the_run_and_the_older_one_stops(
    dataset: Path, tmp_path: Path
) -> None:
    older = start_txl(*command(dataset, tmp_path, *LONG, num_ranks=1))
    wait_until(lambda: num_lines(tmp_path / "metrics.jsonl") > 25, timeout_seconds=180)

    short = (NO_EVALUATION, "training.num_steps=50000", "training.checkpoint_interval_steps=10")
    newer = start_txl(*command(dataset, tmp_path, *short, num_ranks=1), "--force-unlock")
    output, _ = older.communicate(timeout=180)
    assert older.returncode == 4, output
    assert "attempt 2 (host" in output
    assert "took over this run" in output

    wait_until(lambda: "resuming at step" in log_of(tmp_path))
    newest = CheckpointDirectory(tmp_path).newest_step()
    assert newest is not None
    wait_until(lambda: CheckpointDirectory(tmp_path).newest_step() > newest)
    newer.send_signal(signal.SIGTERM)
    output, _ = newer.communicate(timeout=120)
    assert newer.returncode == 75, output
    verify_checkpoint(CheckpointDirectory(tmp_path).at(CheckpointDirectory(tmp_path).newest_step()))
    steps = list(losses(tmp_path))
    assert steps == list(range(1, len(steps) + 1)), "each step once, none is missing"


def log_of(run: Path) -> str:
    return (run / "logs" / "rank-0.log").read_text()
