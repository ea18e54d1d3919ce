"""The sender: every point arrives exactly once, also by a failing server and `txl track sync`."""

import errno
import getpass
import os
import random
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from data_pipeline.system.files import open_descriptor, try_lock
from tests.support.commands import run_txl
from tests.support.training_runs import TINY
from txl_dist.config.config_file import load_run_config
from txl_dist.tracking import process
from txl_dist.tracking.process import page_command
from txl_dist.tracking.sender import Sender, TrainingEnd, deliver
from txl_dist.tracking.tracker import (
    LOCK,
    REQUEST,
    STATE,
    TrackingRequest,
    TrackingState,
    UnavailableError,
    whole_path,
)

from .conftest import (
    MlflowServer,
    client_of,
    recorded_steps,
    request_for,
    run_id_of,
    run_ids,
    sender_for,
    state_of,
    status_of,
    tags_of,
    until_delivered,
    write_steps,
)


def test_a_run_is_recorded_with_its_settings_config_and_end(run_dir: Path) -> None:
    write_steps(run_dir, range(1, 2501))
    long = "x" * 7000
    sender_for(run_dir, params={"a.b": "1", "long": long}, tags={"t": "v"}).finish("finished")

    run = client_of(run_dir).get_run(run_id_of(run_dir))
    assert run.info.status == "FINISHED"
    assert run.data.params["a.b"] == "1"
    assert run.data.params["long"] == long[:6000]
    assert run.data.tags["t"] == "v"
    assert run.data.tags["mlflow.user"] == getpass.getuser()
    assert run.data.tags["mlflow.source.name"] == "txl train"
    assert run.data.tags["mlflow.source.type"] == "LOCAL"
    assert str(run_dir) in run.data.tags["mlflow.note.content"]
    database = run_dir.parent / "mlflow.db"
    assert recorded_steps(database, run.info.run_id) == list(range(1, 2501))


@pytest.mark.fault_row(33)
@pytest.mark.parametrize("moment", ["before a resume", "while running"])
def test_a_deleted_run_is_replaced_by_a_complete_new_one(run_dir: Path, moment: str) -> None:
    write_steps(run_dir, range(1, 6))
    sender = sender_for(run_dir)
    sender.pump()
    deleted = run_id_of(run_dir)
    client_of(run_dir).delete_run(deleted)
    write_steps(run_dir, range(6, 9))
    if moment == "before a resume":
        sender = sender_for(run_dir)
    sender.finish("finished")

    database = run_dir.parent / "mlflow.db"
    assert run_id_of(run_dir) != deleted
    assert recorded_steps(database, run_id_of(run_dir)) == list(range(1, 9))
    assert tags_of(database, run_id_of(run_dir))["txl.parent"] == deleted
    assert status_of(database, run_id_of(run_dir)) == "FINISHED"


@pytest.mark.fault_row(33)
def test_a_finished_run_and_a_deleted_experiment_are_reopened(
    run_dir: Path,
) -> None:
    write_steps(run_dir, range(1, 6))
    sender_for(run_dir).pump()
    client = client_of(run_dir)
    client.set_terminated(run_id_of(run_dir))
    write_steps(run_dir, range(6, 9))
    sender_for(run_dir).pump()
    database = run_dir.parent / "mlflow.db"
    assert status_of(database, run_id_of(run_dir)) == "RUNNING"
    assert recorded_steps(database, run_id_of(run_dir)) == list(range(1, 9))

    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    client.delete_experiment(experiment.experiment_id)
    write_steps(run_dir, range(9, 11))
    sender_for(run_dir).pump()
    assert recorded_steps(database, run_id_of(run_dir)) == list(range(1, 11))


def test_the_tokens_of_an_evaluated_step_are_one_point_and_infinity_is_a_tag(
    run_dir: Path,
) -> None:
    write_steps(run_dir, range(1, 4), tokens=7.0, grad=1.0)
    write_steps(run_dir, range(2, 3), tokens=7.0, **{"valid/tokens_scored": 5.0, "valid/loss": 1.5})
    write_steps(run_dir, range(4, 5), grad=float("inf"))
    write_steps(run_dir, range(5, 6), grad=float("nan"))
    sender_for(run_dir).pump()
    database, run_id = run_dir.parent / "mlflow.db", run_id_of(run_dir)
    assert recorded_steps(database, run_id, "tokens") == [1, 2, 3, 4, 5]
    assert recorded_steps(database, run_id, "valid/loss") == [2]
    assert recorded_steps(database, run_id, "grad") == [1, 2, 3]
    assert tags_of(database, run_id)["txl.not_finite.grad"] == "at step 5"


@pytest.mark.fault_row(32)
@pytest.mark.parametrize("fault", ["500", "401", "lost response"])
def test_points_arrive_once_although_calls_fail(
    run_dir: Path, server: MlflowServer, fault: str
) -> None:
    """A third of all calls fails; with a lost response the call was executed nevertheless."""
    generator = random.Random(1)
    failed = []

    def a_third(path: str, body: bytes) -> str:
        if generator.random() < 1 / 3:
            failed.append(path.rpartition("/")[2])
            return fault
        return ""

    experiment = f"fails with {fault}"
    server.open()
    server.fault = a_third
    sender = sender_for(run_dir, server.uri, experiment=experiment)
    for last in (5, 10, 15):
        write_steps(run_dir, range(last - 4, last + 1))
        until_delivered(sender.pump)
    assert "log-batch" in failed
    assert run_ids(server.database, experiment) == [run_id_of(run_dir)]
    assert recorded_steps(server.database, run_id_of(run_dir)) == list(range(1, 16))


def test_points_that_a_server_dropped_are_sent_again_at_the_end(
    run_dir: Path, server: MlflowServer
) -> None:
    server.open()
    write_steps(run_dir, range(1, 6))
    sender = sender_for(run_dir, server.uri)
    sender.pump()
    server.fault = lambda path, body: "swallow" if b'"metrics"' in body else ""
    write_steps(run_dir, range(6, 11))
    sender.pump()
    assert recorded_steps(server.database, run_id_of(run_dir)) == list(range(1, 6))
    server.fault = None
    sender.finish("finished")
    assert recorded_steps(server.database, run_id_of(run_dir)) == list(range(1, 11))


def test_a_rejected_point_does_not_block_the_others(run_dir: Path, server: MlflowServer) -> None:
    server.open()
    server.fault = lambda path, body: "400" if b"poison" in body else ""
    write_steps(run_dir, range(1, 6))
    write_steps(run_dir, range(6, 7), poison=1.0)
    write_steps(run_dir, range(7, 10))
    sender_for(run_dir, server.uri).pump()
    assert recorded_steps(server.database, run_id_of(run_dir)) == list(range(1, 10))
    assert recorded_steps(server.database, run_id_of(run_dir), "poison") == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_the_default_database_needs_no_hard_links(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    write_steps(run_dir, range(1, 3))
    sender_for(run_dir).pump()
    assert recorded_steps(run_dir.with_name("mlflow.db"), run_id_of(run_dir)) == [1, 2]


@pytest.mark.parametrize("name", ["a%20b?c%", "köln #+@c:d=e f"])
def test_the_default_database_is_made_whole_beside_the_run_whatever_the_folder_is_called(
    tmp_path: Path, name: str
) -> None:
    run_dir = tmp_path / name / name
    run_dir.mkdir(parents=True)
    write_steps(run_dir, range(1, 3))
    sender_for(run_dir).pump()

    database, run_id = run_dir.with_name("mlflow.db"), run_id_of(run_dir)
    assert {path.name for path in run_dir.parent.iterdir()} == {"mlflow.db", name}
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with sqlite3.connect(database) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert recorded_steps(database, run_id) == [1, 2]
    # The command that is printed opens the same database.
    *command, uri = shlex.split(page_command(run_dir, None))
    assert command == ["mlflow", "ui", "--backend-store-uri"]
    assert MlflowClient(uri).get_run(run_id).info.run_name == name


@pytest.mark.parametrize("folder", ["work", "a%20b?c"])
def test_a_relative_database_is_that_of_the_directory_where_training_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    run_dir, database = tmp_path / "runs" / "run", tmp_path / folder / "track" / "my.db"
    for path in (run_dir, tmp_path / folder, tmp_path / "elsewhere"):
        path.mkdir(parents=True)
    monkeypatch.chdir(tmp_path / folder)
    write_steps(run_dir, range(1, 3))
    config = load_run_config(TINY, ["tracking.uri=sqlite:///track/my.db"])
    with monkeypatch.context() as patch:
        patch.setattr(process.TrackingProcess, "_start_sender", lambda self: None)
        request = process.TrackingProcess(run_dir, config)._request
    assert config.tracking.uri == "sqlite:///track/my.db"
    Sender(run_dir, request).pump()
    (run_dir / "logs/tracking-request.json").write_text(request.model_dump_json())

    monkeypatch.chdir(tmp_path / "elsewhere")
    write_steps(run_dir, range(3, 5))
    stored = TrackingRequest.load(run_dir / "logs/tracking-request.json")
    assert stored is not None
    Sender(run_dir, stored).pump()
    assert recorded_steps(database, run_id_of(run_dir)) == [1, 2, 3, 4]
    assert not list(Path.cwd().iterdir())


def test_a_state_with_a_relative_database_continues_its_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an earlier version has stored it."""
    monkeypatch.chdir(run_dir.parent)
    sender_for(run_dir, "sqlite:///mlflow.db").pump()
    before = state_of(run_dir)
    assert before.server == "sqlite:///mlflow.db"
    for server in ("sqlite:///mlflow.db", whole_path("sqlite:///mlflow.db")):
        sender_for(run_dir, server).pump()
        assert state_of(run_dir) == before.model_copy(update={"server": server})


@pytest.mark.parametrize(
    "uri", ["sqlite:////a/b.db", "sqlite://", "sqlite:///:memory:", "http://host:5000/a", None]
)
def test_an_address_without_a_relative_path_stays_as_it_is(uri: str | None) -> None:
    assert whole_path(uri) == uri


def test_sync_of_a_run_that_has_not_ended_is_refused_at_once(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "run_sender", lambda *_, **__: "waited")
    (run_dir / "logs").mkdir()
    request_for().save(run_dir / REQUEST)
    with (
        open_descriptor(run_dir / "lock", os.O_RDWR | os.O_CREAT) as training,
        open_descriptor(run_dir / LOCK, os.O_RDWR | os.O_CREAT) as sender,
    ):
        assert try_lock(training)
        assert try_lock(sender)
        code, output = run_txl("track", "sync", run_dir)
    assert (code, "has not ended" in output) == (1, True)


def test_sync_says_that_it_waits_for_another_sender(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / "logs").mkdir()
    request_for().save(run_dir / REQUEST)
    monkeypatch.setattr(process, "run_sender", lambda *_, **__: "")
    TrackingState(key="0", server=None, experiment="tests", delivered=True).save(run_dir / STATE)
    with open_descriptor(run_dir / LOCK, os.O_RDWR | os.O_CREAT) as sender:
        assert try_lock(sender)
        code, output = run_txl("track", "sync", run_dir)
    assert (code, "another process still delivers" in output) == (0, True)
    code, output = run_txl("track", "sync", run_dir)
    assert (code, "another process still delivers" in output) == (0, False)


SENDER = [sys.executable, "-m", "txl_dist.tracking.sender"]


def test_sync_delivers_what_an_ended_run_did_not(
    run_dir: Path, server: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_steps(run_dir, range(1, 11))
    request = request_for(server.uri.replace("://", "://user:CANARY@"))
    request.save(tmp_path / "request.json")
    command = [*SENDER, str(run_dir), "--request", str(tmp_path / "request.json")]
    command += ["--flush-seconds", "0.2"]
    pipes = dict.fromkeys(("stdin", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes) as sender:
        assert sender.stderr is not None
        warning = sender.stderr.readline()
        _, stderr = sender.communicate(b"preempted\n")
    assert sender.returncode == 75
    assert b"***" in warning
    assert b"CANARY" not in warning + stderr
    assert all(b"CANARY" not in path.read_bytes() for path in run_dir.rglob("*") if path.is_file())

    code, output = run_txl("track", "sync", tmp_path)
    assert (code, "tracking.enabled" in output) == (2, True), "not a run directory"
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)  # MLflow sets it in its server
    code, output = run_txl("track", "sync", run_dir)
    assert code == 2
    assert "credentials are not stored" in output
    server.open()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    code, output = run_txl("track", "sync", run_dir)
    assert code == 0, output
    assert state_of(run_dir).delivered
    run_id = run_id_of(run_dir)
    assert recorded_steps(server.database, run_id) == list(range(1, 11))
    assert tags_of(server.database, run_id)["txl.status"] == "preempted"
    assert f"MLflow run {run_id} has all metrics of {run_dir} (status: preempted)" in output


def test_the_end_is_stored_if_a_call_returns_only_after_the_deadline(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = TrainingEnd(flush_seconds=0)

    def fail_after_the_deadline(_: Sender) -> None:
        if not training.has_ended.is_set():
            training.status = "finished"
            training.end()
        time.sleep(0.01)
        raise UnavailableError("no response")

    monkeypatch.setattr(Sender, "_pump", fail_after_the_deadline)
    monkeypatch.setattr(signal, "alarm", lambda seconds: None)  # the watchdog
    assert deliver(Sender(run_dir, request_for()), training) == "no response"
    assert state_of(run_dir).status == "finished"


SLOW_IMPORT = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "mlflow":
            time.sleep(7)
sys.meta_path.insert(0, Slow())
"""


@pytest.mark.slow
@pytest.mark.parametrize("status", [b"", b"finished\n"], ids=["sync", "end of training"])
def test_the_time_to_deliver_begins_after_the_import(
    run_dir: Path, server: MlflowServer, tmp_path: Path, status: bytes
) -> None:
    """A slow import of mlflow does not count; a failing server uses the whole time."""
    write_steps(run_dir, range(1, 11))
    request = run_dir / "logs/tracking-request.json"
    request.parent.mkdir(exist_ok=True)
    request_for(server.uri).save(request)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(SLOW_IMPORT)
    path = f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"

    def deliver_within(seconds: float, **environment: str) -> int:
        command = [*SENDER, str(run_dir), "--flush-seconds", str(seconds)]
        command += ["--request", str(request)] if status else []
        return subprocess.run(
            command, env={**os.environ, **environment}, input=status, check=False
        ).returncode

    assert deliver_within(0.5) == 75
    server.open()
    assert deliver_within(1, PYTHONPATH=path) == 0
    assert recorded_steps(server.database, run_id_of(run_dir)) == list(range(1, 11))
