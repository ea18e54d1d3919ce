"""Rows 28 and 29 of the fault matrix: a NaN on one of two ranks, and a loss spike, by policy."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import wait_until
from tests.support.diverging_runs import Fault, HighRate, NanWeight, train_with
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, losses, tiny_spec
from txl_dist.tracking.journal import read_metrics
from txl_dist.tracking.tracker import TrackingState

SETTINGS = (NO_EVALUATION, "training.num_steps=16", "training.checkpoint_interval_steps=4")
SPIKES = ("divergence.loss_spike=10", "divergence.window_steps=6", "divergence.max_events=3")
FAULTS: dict[str, Fault] = {"nan": NanWeight(rank=1, step=10), "spike": HighRate(9)}
"""Both are seen in the loss of step 10, and the weights stay bad until a rollback."""


@pytest.mark.fault_row(28, 29)
@pytest.mark.fault
@pytest.mark.parametrize("fault", FAULTS)
def test_stop_ends_the_run_at_the_event(
    ranks: RankGroups, dataset: Path, tmp_path: Path, fault: str
) -> None:
    spec = tiny_spec(dataset, tmp_path, *SETTINGS, *SPIKES)
    for code, message, _ in ranks(2).run(train_with, spec, FAULTS[fault]):
        assert code == 5
        assert "the loss of step 10 is " in message
        assert "no rank has changed its weights" in message
        assert str(tmp_path / "events" / "divergence-step-00000010-rank-*.json") in message
    assert max(losses(tmp_path)) == 9
    assert len([*(tmp_path / "events").iterdir()]) == 2


@pytest.mark.fault_row(28, 29)
@pytest.mark.fault
@pytest.mark.parametrize("fault", FAULTS)
def test_skip_cannot_repair_weights_and_ends_after_max_events(
    ranks: RankGroups, dataset: Path, tmp_path: Path, fault: str
) -> None:
    # Stage 0: at stages 1 to 3 every update copies the masters over a damaged weight.
    spec = tiny_spec(
        dataset, tmp_path, *SETTINGS, *SPIKES, "divergence.policy=skip", "deepspeed.zero_stage=0"
    )
    for code, message, events in ranks(2).run(train_with, spec, FAULTS[fault]):
        assert code == 5
        assert "the loss of step 13 is " in message
        assert "event 4 within 1000 steps, more than divergence.max_events=3" in message
        assert len(events) == 3
    assert max(losses(tmp_path)) == 9


@pytest.mark.fault_row(28, 29)
@pytest.mark.fault
@pytest.mark.parametrize("fault", FAULTS)
def test_rollback_ends_with_the_same_losses_on_one_and_two_ranks(
    ranks: RankGroups, dataset: Path, tmp_path: Path, fault: str
) -> None:
    faults: dict[int, Fault] = {
        1: NanWeight(rank=0, step=10) if fault == "nan" else FAULTS[fault],
        2: FAULTS[fault],
    }
    for num_ranks in (1, 2):
        run = tmp_path / str(num_ranks)
        spec = tiny_spec(dataset, run, *SETTINGS, *SPIKES, "divergence.policy=rollback")
        ends = ranks(num_ranks).run(train_with, spec, faults[num_ranks])
        assert [code for code, *_ in ends] == [0] * num_ranks
        assert {*range(1, 17)} - {*losses(run)} == {9, 10}
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=2e-6)


def wait_for_the_sender(trainer: Any) -> None:
    """MLflow has all steps before the one that diverges, which a rollback takes back."""
    roll_back, run = trainer.recovery.roll_back, trainer.config.run_path

    def waiting(state: Any, error: Any) -> Any:
        if trainer.step.world.is_rank_zero:
            wait_until(lambda: _newest_recorded(run) == 9, timeout_seconds=60, poll_seconds=0.25)
        return roll_back(state, error)

    trainer.recovery = _Replaced(trainer.recovery, roll_back=waiting)


class _Replaced:
    """An object with other methods."""

    def __init__(self, target: Any, **methods: Any) -> None:
        self._target = target
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def _tracking(run: Path) -> TrackingState:
    return TrackingState.load(run / "tracking.json") or TrackingState(
        key="", server=None, experiment=""
    )


def _points(run: Path, run_id: str) -> list[tuple[str, int, float]]:
    with sqlite3.connect(run.parent / "mlflow.db") as connection:
        rows = connection.execute(
            "SELECT key, step, value FROM metrics WHERE run_uuid = ?", (run_id,)
        )
        return sorted(rows)


def _newest_recorded(run: Path) -> int:
    run_id = _tracking(run).run_id
    return max((step for _, step, _ in _points(run, run_id)), default=0) if run_id else 0


@pytest.mark.fault_row(28)
@pytest.mark.fault
def test_after_a_rollback_the_curves_equal_the_journal(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    """A real sender and a real SQLite database; each point once, and none of a step taken back."""
    run = tmp_path / "run"
    settings = (*SETTINGS, *SPIKES, "divergence.policy=rollback", "tracking.enabled=true")
    spec = tiny_spec(dataset, run, *settings, "training.rank_timeout_seconds=120")
    ends = ranks(2).run(train_with, spec, HighRate(9), wait_for_the_sender)
    assert [code for code, *_ in ends] == [0, 0]
    wait_until(lambda: _tracking(run).delivered, timeout_seconds=60)
    journal = sorted(
        (name, line["step"], value)
        for line in read_metrics(run / "metrics.jsonl")
        for name, value in line.items()
        if name not in ("step", "time")
    )
    run_id = _tracking(run).run_id
    assert run_id
    assert _points(run, run_id) == journal
    assert ("rollbacks", 16, 1) in journal
    assert ("skipped_steps", 16, 2) in journal
