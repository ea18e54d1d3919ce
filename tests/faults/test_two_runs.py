"""Two runs at the same time, on one machine or in one directory, and after a kill."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.commands import children_of, is_alive, num_lines, start_txl, txl, wait_until
from tests.support.training_runs import NO_EVALUATION, TINY, losses

pytestmark = pytest.mark.fault
LONG = (NO_EVALUATION, "training.num_steps=5000", "training.checkpoint_interval_steps=20")


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
    wait_until(lambda: num_lines(tmp_path / "metrics.jsonl") > 25, timeout_seconds=120)
    ranks = children_of(first.pid)

    second = txl(*command(dataset, tmp_path, *LONG))
    assert second.returncode == 2
    assert "in use by another run" in second.stderr
    lines = num_lines(tmp_path / "metrics.jsonl")
    wait_until(lambda: num_lines(tmp_path / "metrics.jsonl") > lines)

    for pid in (first.pid, *ranks):
        os.kill(pid, signal.SIGKILL)
    first.communicate(timeout=60)
    wait_until(lambda: not any(is_alive(rank) for rank in ranks), timeout_seconds=30)
    third = start_txl(*command(dataset, tmp_path, *LONG, num_ranks=1))
    wait_until(lambda: "resuming at step" in log_of(tmp_path), timeout_seconds=120)
    third.send_signal(signal.SIGTERM)
    output, _ = third.communicate(timeout=120)
    assert third.returncode == 75, output


def log_of(run: Path) -> str:
    return (run / "logs" / "rank-0.log").read_text()
