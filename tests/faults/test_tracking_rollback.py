"""A killed and resumed run: its MLflow run equals metrics.jsonl, every point of it."""

import os
import signal
import sqlite3
from pathlib import Path

import pytest

from tests.support.commands import children_of, is_alive, num_lines, start_txl, txl, wait_until
from tests.support.training_runs import NO_EVALUATION, TINY
from txl_dist.tracking.journal import read_metrics
from txl_dist.tracking.tracker import TrackingState

SETTINGS = (
    NO_EVALUATION,
    "tracking={enabled: true, experiment: rollback}",
    "training.num_steps=400",
    "training.checkpoint_interval_steps=100",
)


def _state(run: Path) -> TrackingState | None:
    return TrackingState.load(run / "tracking.json")


def _recorded(run: Path, run_id: str) -> list[tuple[str, int, float]]:
    with sqlite3.connect(run.parent / "mlflow.db") as connection:
        rows = connection.execute(
            "SELECT key, step, value FROM metrics WHERE run_uuid = ?", (run_id,)
        )
        return sorted(rows)


def _newest_recorded(run: Path) -> int:
    state = _state(run)
    points = _recorded(run, state.run_id) if state and state.run_id else []
    return max((step for _, step, _ in points), default=0)


def _journalled(run: Path) -> list[tuple[str, int, float]]:
    return sorted(
        (name, line["step"], value)
        for line in read_metrics(run / "metrics.jsonl")
        for name, value in line.items()
        if name not in ("step", "time")
    )


@pytest.mark.fault_row(2)
@pytest.mark.fault
def test_after_a_sigkill_and_a_resume_the_curves_equal_the_journal(
    dataset: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = (f"data.path={dataset}", f"directory={run}", *SETTINGS)
    command = ("train", TINY, *settings, "--on", "processes", "--ranks", 2)
    process = start_txl(*command)
    wait_until(lambda: num_lines(run / "metrics.jsonl") > 150)
    (rank, *_) = children_of(process.pid)
    os.kill(rank, signal.SIGSTOP)  # so that the sender catches up
    journalled = max(line["step"] for line in read_metrics(run / "metrics.jsonl"))
    wait_until(lambda: _newest_recorded(run) == journalled, poll_seconds=0.25)
    os.kill(rank, signal.SIGKILL)
    process.communicate(timeout=120)
    assert not is_alive(rank)
    first = _state(run)

    finished = txl(*command, timeout_seconds=240)
    assert finished.returncode == 0, finished.stderr + finished.stdout
    wait_until(lambda: (s := _state(run)) is not None and s.delivered)
    second = _state(run)
    assert first is not None
    assert first.run_id
    assert second is not None
    assert second.run_id
    assert _recorded(run, second.run_id) == _journalled(run)
    abandoned = {step for _, step, _ in _recorded(run, first.run_id)}
    assert max(abandoned) == journalled


def _status(run: Path) -> tuple[str, str]:
    """Status and `txl.status` of the MLflow run of a run directory."""
    state = _state(run)
    assert state is not None
    with sqlite3.connect(run.parent / "mlflow.db") as connection:
        (status,) = connection.execute(
            "SELECT status FROM runs WHERE run_uuid = ?", (state.run_id,)
        ).fetchone()
        (tag,) = connection.execute(
            "SELECT value FROM tags WHERE run_uuid = ? AND key = 'txl.status'", (state.run_id,)
        ).fetchone()
    return status, tag


@pytest.mark.fault
def test_a_run_that_fails_is_finished_by_its_next_start(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = (f"data.path={dataset}", f"directory={run}", *SETTINGS)
    # The last step before the failure is saved, so no step of the first start is undone.
    steps = ("training.num_steps=60", "training.checkpoint_interval_steps=30")
    command = ("train", TINY, *settings, *steps, "--on", "processes")
    failed = txl(*command, environment={"TXL_FAULT": "step:raise:31"})
    assert failed.returncode == 1, failed.stderr + failed.stdout
    wait_until(lambda: (s := _state(run)) is not None and s.delivered)
    first = _state(run)
    assert _status(run) == ("FAILED", "failed")

    finished = txl(*command)
    assert finished.returncode == 0, finished.stderr + finished.stdout
    wait_until(lambda: _status(run) == ("FINISHED", "finished"))
    second = _state(run)
    assert first is not None
    assert second is not None
    assert second.run_id == first.run_id
    assert _recorded(run, second.run_id or "") == _journalled(run)
