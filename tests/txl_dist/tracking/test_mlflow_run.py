"""After a rollback the MLflow run equals metrics.jsonl, point by point, in a real MLflow."""

import random
import sqlite3
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from txl_dist.doctor.checks import check_tracking
from txl_dist.tracking.journal import MetricsJournal, read_metrics
from txl_dist.tracking.mlflow_client import UnavailableError

from .conftest import (
    START,
    MlflowServer,
    delivery_for,
    recorded_steps,
    run_id_of,
    run_ids,
    status_of,
    tags_of,
    write_steps,
)


def _curves(database: Path, run_id: str) -> list[tuple[str, int, int, float]]:
    """Every point in MLflow's own table, duplicates included."""
    with sqlite3.connect(database) as connection:
        rows = connection.execute(
            "SELECT key, step, timestamp, value FROM metrics WHERE run_uuid = ?", (run_id,)
        )
        return sorted(rows)


def _journalled(run_dir: Path) -> list[tuple[str, int, int, float]]:
    return sorted(
        (name, line["step"], int(line["time"] * 1000), value)
        for line in read_metrics(run_dir / "metrics.jsonl")
        for name, value in line.items()
        if name not in ("step", "time")
    )


def _roll_back(run_dir: Path, step: int) -> None:
    with MetricsJournal(run_dir / "metrics.jsonl") as journal:
        journal.truncate_after(step)


def test_a_rollback_continues_in_a_new_run_that_equals_the_journal(run_dir: Path) -> None:
    database = run_dir.parent / "mlflow.db"
    write_steps(run_dir, range(1, 41), gradient=2.0)
    delivery_for(run_dir).pump()  # killed here, without an end
    first = run_id_of(run_dir)
    evaluation = MlflowClient(f"sqlite:///{database}").create_run(
        "1", tags={"mlflow.parentRunId": first}
    )
    _roll_back(run_dir, 30)
    write_steps(run_dir, range(31, 51), since=START + 1000, gradient=3.0)

    delivery = delivery_for(run_dir)
    delivery.pump()
    delivery.set_end_status("finished")
    delivery.finish()

    second = run_id_of(run_dir)
    assert _curves(database, second) == _journalled(run_dir)
    assert status_of(database, second) == "FINISHED"
    assert recorded_steps(database, first) == list(range(1, 41)), "the abandoned run is kept"
    assert status_of(database, first) == "KILLED"
    abandoned = tags_of(database, first)
    assert abandoned["mlflow.parentRunId"] == second
    assert abandoned["txl.abandoned"] == f"from step 31 on; continued in run {second}"
    assert abandoned["mlflow.runName"] == "run (abandoned from step 31)"
    assert tags_of(database, evaluation.info.run_id)["mlflow.parentRunId"] == second


def test_the_runs_of_several_rollbacks_are_all_children_of_the_newest(run_dir: Path) -> None:
    database = run_dir.parent / "mlflow.db"
    for rollback, last in enumerate((40, 35, 50)):
        write_steps(run_dir, range(1 + 10 * rollback, last + 1), since=START + 1000 * rollback)
        delivery_for(run_dir).pump()
        if last != 50:
            _roll_back(run_dir, 10 * (rollback + 1))
    newest = run_id_of(run_dir)
    assert _curves(database, newest) == _journalled(run_dir)
    others = [run_id for run_id in run_ids(database) if run_id != newest]
    assert [tags_of(database, run_id)["mlflow.parentRunId"] for run_id in others] == [newest] * 2


def test_a_resume_that_loses_no_point_continues_the_same_run(run_dir: Path) -> None:
    database = run_dir.parent / "mlflow.db"
    write_steps(run_dir, range(1, 31))
    delivery_for(run_dir, params={"lr": "1"}).pump()
    MlflowClient(f"sqlite:///{database}").log_metric(run_id_of(run_dir), "by a user", 1.0, step=99)
    _roll_back(run_dir, 30)
    write_steps(run_dir, range(31, 51), since=START + 1000)
    delivery = delivery_for(run_dir, params={"lr": "2"})
    delivery.pump()
    delivery.set_end_status("preempted")
    delivery.finish()

    assert run_ids(database) == [run_id_of(run_dir)]
    own = [point for point in _curves(database, run_id_of(run_dir)) if point[0] != "by a user"]
    assert own == _journalled(run_dir)
    tags = tags_of(database, run_id_of(run_dir))
    assert (tags["txl.changed.lr"], tags["txl.status"]) == ("2", "preempted")


def _train_to(
    run_dir: Path, *, steps: range, since: float = START, status: str = "finished"
) -> str:
    """Continue a run as training and its sender do; returns the id of its MLflow run."""
    write_steps(run_dir, steps, since=since)
    delivery = delivery_for(run_dir)
    delivery.pump()
    delivery.set_end_status(status)
    delivery.finish()
    return run_id_of(run_dir)


@pytest.mark.parametrize("copy", [("cp", "-r"), ("cp", "-a")])
def test_a_copy_of_a_run_directory_is_a_fork_with_a_run_of_its_own(
    run_dir: Path, copy: tuple[str, ...]
) -> None:
    """The MLflow run of the original has no point of the copy, and the reverse; both end."""
    database, other = run_dir.parent / "mlflow.db", run_dir.parent / "other"
    original = _train_to(run_dir, steps=range(1, 11), status="preempted")
    subprocess.run([*copy, run_dir, other], check=True)
    fork = _train_to(other, steps=range(11, 15), since=START + 1000)
    assert fork != original
    assert _train_to(run_dir, steps=range(11, 18), since=START + 2000) == original
    assert _train_to(other, steps=range(15, 20), since=START + 3000) == fork

    assert sorted(run_ids(database)) == sorted([original, fork])
    for directory, run_id in ((run_dir, original), (other, fork)):
        assert _curves(database, run_id) == _journalled(directory)
        assert status_of(database, run_id) == "FINISHED"
        assert "txl.abandoned" not in tags_of(database, run_id)
    assert tags_of(database, fork)["txl.parent"] == original


def test_syncing_a_copy_does_not_write_to_the_run_of_the_original(run_dir: Path) -> None:
    write_steps(run_dir, range(1, 6), since=START)
    delivery = delivery_for(run_dir, new_run_key="of the original")
    delivery.pump()
    delivery.finish()
    original, other = run_id_of(run_dir), run_dir.parent / "other"
    subprocess.run(["cp", "-r", run_dir, other], check=True)
    # `txl track sync` reads the request that was copied with the directory.
    synced = delivery_for(other, new_run_key="of the original")
    synced.pump()
    synced.finish()
    assert run_id_of(other) != original
    assert tags_of(run_dir.parent / "mlflow.db", run_id_of(other))["txl.parent"] == original


def test_a_renamed_run_directory_keeps_its_mlflow_run(run_dir: Path) -> None:
    first = _train_to(run_dir, steps=range(1, 6), status="preempted")
    run_dir.rename(run_dir.parent / "renamed")
    assert _train_to(run_dir.parent / "renamed", steps=range(6, 11)) == first
    assert run_ids(run_dir.parent / "mlflow.db") == [first]


def test_points_that_no_later_step_replaces_are_not_in_the_curve(run_dir: Path) -> None:
    """A run that resumes and ends early; a metric that is no longer written."""
    database = run_dir.parent / "mlflow.db"
    write_steps(run_dir, range(1, 41))
    write_steps(run_dir, range(41, 42), scored_once=5.0)
    delivery_for(run_dir).pump()
    _roll_back(run_dir, 30)
    delivery = delivery_for(run_dir)
    delivery.pump()
    delivery.set_end_status("finished")
    delivery.finish()
    assert _curves(database, run_id_of(run_dir)) == _journalled(run_dir)
    (abandoned,) = set(run_ids(database)) - {run_id_of(run_dir)}
    assert tags_of(database, abandoned)["txl.abandoned"].startswith("from step 31 on")


def test_a_running_delivery_notices_a_rollback(run_dir: Path) -> None:
    write_steps(run_dir, range(1, 41))
    delivery = delivery_for(run_dir)
    delivery.pump()
    write_steps(run_dir, range(41, 46))  # never sent
    _roll_back(run_dir, 30)
    write_steps(run_dir, range(31, 36), since=START + 1000)
    delivery.pump()
    assert _curves(run_dir.parent / "mlflow.db", run_id_of(run_dir)) == _journalled(run_dir)


@pytest.mark.fault_row(32)
@pytest.mark.parametrize("fault", [pytest.param("500", marks=pytest.mark.slow), "lost response"])
def test_a_rollback_in_outages_records_every_point_once(
    run_dir: Path, server: MlflowServer, fault: str
) -> None:
    """A third of all calls fails; with a lost response the call was executed nevertheless."""
    generator = random.Random(0)
    experiment = f"rollback with {fault}"
    server.open()
    server.fault = lambda path, body: fault if generator.random() < 1 / 3 else ""
    for rollback in range(3):
        since = START + 1000 * rollback
        write_steps(run_dir, range(5 * rollback + 1, 5 * rollback + 11), since=since, other=1.5)
        delivery = delivery_for(run_dir, server.uri, experiment=experiment)
        for _ in range(300):
            try:
                delivery.pump()
                delivery.finish()
                break
            except UnavailableError:
                continue
        else:
            pytest.fail("never delivered")
        newest = run_id_of(run_dir)
        assert _curves(server.database, newest) == _journalled(run_dir)
        others = set(run_ids(server.database, experiment)) - {newest}
        assert {tags_of(server.database, o)["mlflow.parentRunId"] for o in others} <= {newest}
        assert len(others) == rollback
        _roll_back(run_dir, 5 * (rollback + 1))


def test_the_doctor_accepts_a_real_server_and_reports_its_refusals(server: MlflowServer) -> None:
    (refused,) = check_tracking(server.uri)
    server.open()
    (accepted,) = check_tracking(server.uri)
    server.fault = lambda path, body: "401" if "experiments" in path else ""
    (unauthorized,) = check_tracking(server.uri)
    assert [refused.status, accepted.status, unauthorized.status] == ["problem", "ok", "problem"]
    assert version("mlflow") in accepted.found
    assert "401" in unauthorized.found
