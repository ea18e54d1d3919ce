"""Promise 3, under a kill: the losses are those of the run that was never killed, bit for bit."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import (
    ENVIRONMENT,
    children_of,
    is_alive,
    num_lines,
    output_of,
    start_txl,
    txl,
    wait_until,
)
from tests.support.training_runs import losses, metrics, saved_last_step, train_words
from tests.txl_dist.tracking.conftest import run_id_of, status_of, tags_of
from txl_dist.tracking.tracker import TrackingState

NUM_STEPS = 200
SETTINGS = (
    f"training.num_steps={NUM_STEPS}",
    "training.checkpoint_interval_steps=40",
    "evaluation.interval_steps=80",
    "evaluation.max_tokens=500",
    "model.dropout=0.1",
)


def kill_and_resume(dataset: Path, run: Path, *, victim: str) -> None:
    command = train_words(dataset, run, *SETTINGS)
    process = start_txl(*command)
    # A save in the background may take longer than the steps.
    wait_until(lambda: num_lines(run / "metrics.jsonl") > 60 and (run / "LATEST").exists())
    ranks = children_of(process.pid)
    assert len(ranks) == 2
    os.kill(process.pid if victim == "launcher" else ranks[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    if victim == "rank":
        assert process.returncode == 1
        assert "rank 1 was killed by SIGKILL" in output
        assert "resumes from the newest checkpoint" in output
    wait_until(lambda: not any(is_alive(rank) for rank in ranks), timeout_seconds=30)
    assert num_lines(run / "metrics.jsonl") < NUM_STEPS

    finished = txl(*command)
    assert finished.returncode == 0, finished.stderr + finished.stdout
    assert "resuming at step" in finished.stdout


@pytest.mark.fault_row(1, 2)
@pytest.mark.fault
@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_losses_after_a_sigkill_are_those_of_an_uninterrupted_run(
    dataset: Path, straight: Callable[..., Path], tmp_path: Path, victim: str
) -> None:
    kill_and_resume(dataset, tmp_path, victim=victim)
    assert losses(tmp_path) == losses(straight(*SETTINGS))
    evaluations = [line for line in metrics(tmp_path) if "valid/loss" in line]
    expected = [line for line in metrics(straight(*SETTINGS)) if "valid/loss" in line]
    assert [e["valid/loss"] for e in evaluations] == [e["valid/loss"] for e in expected]


@pytest.mark.fault_row(5)
@pytest.mark.fault
def test_sigterm_saves_and_exits_75_and_the_run_goes_on(
    dataset: Path, straight: Callable[..., Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    tracking = ("tracking.enabled=true", "tracking.experiment=tests")
    words = train_words(dataset, run, *SETTINGS, *tracking)
    process = start_txl(*words)
    wait_until(lambda: num_lines(run / "metrics.jsonl") > 20)
    process.send_signal(signal.SIGTERM)
    output_of(process, 75, timeout_seconds=60)
    stopped_at = saved_last_step(run)
    wait_until(lambda: _mlflow_status(run) == ("KILLED", "preempted"), poll_seconds=0.25)

    finished = txl(*words)
    assert finished.returncode == 0, finished.stderr
    assert f"resuming at step {stopped_at}" in finished.stdout
    assert losses(run) == losses(straight(*SETTINGS))
    wait_until(lambda: _mlflow_status(run) == ("FINISHED", "finished"), poll_seconds=0.25)


def _mlflow_status(run: Path) -> tuple[str, str]:
    """The delivered status of a run, in MLflow's words and in ours; empty before a delivery."""
    state = TrackingState.load(run / "tracking.json")
    if state is None or not state.delivered:
        return "", ""
    database, run_id = run.parent / "mlflow.db", run_id_of(run)
    return status_of(database, run_id), tags_of(database, run_id).get("txl.status", "")


@pytest.mark.fault
@pytest.mark.fault_row(1, 2, 5, 8, 32)
def test_twenty_random_kills_change_no_number(tmp_path: Path) -> None:
    """`make chaos` at a small size."""
    repository = Path(__file__).parents[2]
    chaos = (repository / "benchmarks" / "chaos.py", "--kills", "20", "--out", tmp_path)
    ended = subprocess.run(
        [sys.executable, *map(str, chaos)],
        check=False,
        capture_output=True,
        text=True,
        timeout=3000,
        env={**ENVIRONMENT, "PYTHONPATH": str(repository)},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["kills"] == 20
    assert result["largest_loss_difference"] == 0.0
    for comparison in result["comparisons"]:
        assert all(comparison[part] for part in ("metrics", "weights", "mlflow", "copy"))
    assert sum(result["by_phase"].values()) == 20
    assert result["by_phase"]["upload"]
    assert result["by_phase"]["replay"]
    assert result["lost_disks"]
    assert (tmp_path / "chaos.png").stat().st_size > 10_000
