"""MLflow: after a rollback its run equals metrics.jsonl, point by point; its datasets and names."""

import json
import random
import re
import sqlite3
import subprocess
from functools import partial
from itertools import pairwise
from pathlib import Path

import mlflow
import pytest

from tests.support.commands import txl
from tests.support.training_runs import TINY
from txl_dist.launch.doctor import check_tracking
from txl_dist.tracking.journal import MetricsJournal, read_metrics
from txl_dist.tracking.mlflow_tracker import clean_key
from txl_dist.tracking.tracker import TrackedDataset

from .conftest import (
    START,
    MlflowServer,
    client_of,
    recorded_steps,
    run_id_of,
    run_ids,
    sender_for,
    status_of,
    tags_of,
    until_delivered,
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
    sender_for(run_dir).pump()  # killed here, without an end
    first = run_id_of(run_dir)
    _roll_back(run_dir, 30)
    write_steps(run_dir, range(31, 51), since=START + 1000, gradient=3.0)

    sender_for(run_dir).finish("finished")

    second = run_id_of(run_dir)
    assert _curves(database, second) == _journalled(run_dir)
    assert status_of(database, second) == "FINISHED"
    assert recorded_steps(database, first) == list(range(1, 41)), "the superseded run is kept"
    assert status_of(database, first) == "KILLED"
    superseded = tags_of(database, first)
    assert superseded["mlflow.parentRunId"] == second
    assert superseded["txl.status"] == "superseded"
    assert tags_of(database, second)["txl.parent"] == first


def test_a_resume_that_loses_no_point_continues_the_same_run(run_dir: Path) -> None:
    database = run_dir.parent / "mlflow.db"
    write_steps(run_dir, range(1, 31))
    sender_for(run_dir, params={"lr": "1"}).pump()
    client = client_of(run_dir)
    client.log_metric(run_id_of(run_dir), "by a user", 1.0, step=99)
    client.set_tag(run_id_of(run_dir), "mlflow.note.content", "the one with a bug")
    _roll_back(run_dir, 30)
    write_steps(run_dir, range(31, 51), since=START + 1000)
    sender_for(run_dir, params={"lr": "2"}).finish("preempted")

    assert run_ids(database) == [run_id_of(run_dir)]
    own = [point for point in _curves(database, run_id_of(run_dir)) if point[0] != "by a user"]
    assert own == _journalled(run_dir)
    tags = tags_of(database, run_id_of(run_dir))
    assert (tags["txl.changed.lr"], tags["txl.status"]) == ("2", "preempted")
    assert tags["mlflow.note.content"] == "the one with a bug"


def _train_to(
    run_dir: Path, *, steps: range, since: float = START, status: str = "finished"
) -> str:
    """Continue a run as training and its sender do; returns the id of its MLflow run."""
    write_steps(run_dir, steps, since=since)
    sender_for(run_dir).finish(status)
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
        assert tags_of(database, run_id)["txl.status"] == "finished"
    assert tags_of(database, fork)["txl.parent"] == original


def test_a_renamed_run_directory_keeps_its_mlflow_run(run_dir: Path) -> None:
    first = _train_to(run_dir, steps=range(1, 6), status="preempted")
    run_dir.rename(run_dir.parent / "renamed")
    assert _train_to(run_dir.parent / "renamed", steps=range(6, 11)) == first
    assert run_ids(run_dir.parent / "mlflow.db") == [first]


@pytest.mark.parametrize("is_running", [True, False])
def test_points_that_no_later_step_replaces_are_not_in_the_curve(
    run_dir: Path, is_running: bool
) -> None:
    """A run that resumes and ends early, also while its sender lives; a metric of one step."""
    database = run_dir.parent / "mlflow.db"
    write_steps(run_dir, range(1, 41))
    write_steps(run_dir, range(41, 42), scored_once=5.0)
    sender = sender_for(run_dir)
    sender.pump()
    write_steps(run_dir, range(42, 46))  # never sent
    _roll_back(run_dir, 30)
    if is_running:
        write_steps(run_dir, range(31, 36), since=START + 1000)
    (sender if is_running else sender_for(run_dir)).finish("finished")
    assert _curves(database, run_id_of(run_dir)) == _journalled(run_dir)
    (superseded,) = set(run_ids(database)) - {run_id_of(run_dir)}
    assert tags_of(database, superseded)["txl.status"] == "superseded"


@pytest.mark.fault_row(32)
@pytest.mark.parametrize("fault", [pytest.param("500", marks=pytest.mark.slow), "lost response"])
def test_a_rollback_in_outages_records_every_point_once(
    run_dir: Path, server: MlflowServer, fault: str
) -> None:
    """A third of all calls fails; with a lost response the call was executed nevertheless.

    A superseded run is a child of the run that supersedes it.
    """
    generator = random.Random(0)
    experiment = f"rollback with {fault}"
    server.open()
    server.fault = lambda path, body: fault if generator.random() < 1 / 3 else ""
    runs: list[str] = []
    for rollback in range(3):
        since = START + 1000 * rollback
        write_steps(run_dir, range(5 * rollback + 1, 5 * rollback + 11), since=since, other=1.5)
        sender = sender_for(run_dir, server.uri, experiment=experiment)
        until_delivered(partial(sender.finish, "finished"))
        newest = run_id_of(run_dir)
        assert _curves(server.database, newest) == _journalled(run_dir)
        for superseded, by in pairwise([*runs, newest]):
            tags = tags_of(server.database, superseded)
            assert (tags["txl.status"], tags["mlflow.parentRunId"]) == ("superseded", by)
        runs.append(newest)
        assert sorted(run_ids(server.database, experiment)) == sorted(runs)
        _roll_back(run_dir, 5 * (rollback + 1))


def test_the_doctor_accepts_a_real_server_and_reports_its_refusals(server: MlflowServer) -> None:
    (refused,) = check_tracking(server.uri)
    server.open()
    (accepted,) = check_tracking(server.uri)
    server.fault = lambda path, body: "401" if "experiments" in path else ""
    (unauthorized,) = check_tracking(server.uri)
    assert [refused.status, accepted.status, unauthorized.status] == ["problem", "ok", "problem"]
    assert "UNAUTHENTICATED" in unauthorized.found


@pytest.mark.fault_row(45)
def test_metric_names_become_legal_and_contain_no_relative_paths() -> None:
    assert clean_key("valid/loss per byte") == "valid/loss per byte"
    assert clean_key("../../etc/x") == "etc/x"
    assert clean_key("/a//b/./c?") == "a/b/c_"
    assert clean_key("..") == "_"
    assert len(clean_key("k" * 999)) == 250


DIGEST = "0123456789abcdef" * 4
DATASETS = (
    TrackedDataset(
        name="books/train", digest=DIGEST, source="/data/books", context="training",
        profile={"tokens": 900, "documents": 9, "dtype": "uint16"},
    ),
    TrackedDataset(
        name="books/valid", digest=DIGEST, source="/data/books", context="evaluation",
        profile={"tokens": 100},
    ),
)  # fmt: skip
HOW_TO = Path(__file__).parents[3] / "docs" / "how_to" / "track_with_mlflow.md"


def test_the_data_of_a_run_are_inputs_with_their_context_and_sizes(run_dir: Path) -> None:
    for _ in range(2):  # a resume records nothing twice
        sender_for(run_dir, datasets=DATASETS).pump()
    client = client_of(run_dir)
    inputs = client.get_run(run_id_of(run_dir)).inputs.dataset_inputs
    found = {
        (i.dataset.name, i.dataset.digest, i.tags[0].value): json.loads(i.dataset.profile or "")
        for i in inputs
    }
    assert len(inputs) == 2
    training = found["books/train", DIGEST[:36], "training"]
    assert training == {"tokens": 900, "documents": 9, "dtype": "uint16", "sha256": DIGEST}
    assert found["books/valid", DIGEST[:36], "evaluation"]["tokens"] == 100
    first = next(i.dataset for i in inputs if i.dataset.name == "books/train")
    assert mlflow.data.get_source(first).uri == "/data/books"


def test_a_server_without_datasets_gets_everything_else(
    run_dir: Path, server: MlflowServer
) -> None:
    """An old server answers 404, for ever."""
    server.open()
    server.fault = lambda path, body: "404" if "log-inputs" in path else ""
    write_steps(run_dir, range(1, 6))
    sender_for(run_dir, server.uri, datasets=DATASETS, experiment="old").pump()
    assert recorded_steps(server.database, run_id_of(run_dir)) == [1, 2, 3, 4, 5]


def test_the_how_to_finds_the_best_checkpoint(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, loss in ((5, 2.0), (10, 1.5), (15, 1.7)):
        write_steps(run_dir, range(step, step + 1), **{"valid/loss": loss})
    tags = {"txl.run_directory": str(run_dir)}
    sender_for(run_dir, experiment="books", tags=tags).pump()
    (code,) = re.findall(r"```python\n(.*?)```", HOW_TO.read_text(), re.DOTALL)
    monkeypatch.chdir(run_dir.parent)
    (run_dir.parent / "runs").mkdir()
    (run_dir.parent / "runs/mlflow.db").symlink_to(run_dir.parent / "mlflow.db")
    values: dict[str, object] = {}
    exec(compile(code, HOW_TO, "exec"), values)
    assert (values["loss"], values["step"], values["run"]) == (1.5, 10, str(run_dir))


@pytest.mark.slow
def test_a_real_run_has_its_data_and_the_commit_of_the_code(dataset: Path, run_dir: Path) -> None:
    run = run_dir.with_name("real")
    done = txl(
        *("train", TINY, f"data.path={dataset}", f"directory={run}", "--on", "processes"),
        *("tracking={enabled: true, experiment: real}", "training.grace_seconds=200"),
        timeout_seconds=400,
    )
    assert done.returncode == 0, done.stderr
    client = client_of(run_dir)
    recorded = client.get_run(run_id_of(run))
    contexts = recorded.inputs.dataset_inputs
    assert sorted(i.tags[0].value for i in contexts) == ["evaluation", "training"]
    assert re.fullmatch(r"[0-9a-f]{40}", recorded.data.tags["mlflow.source.git.commit"])
