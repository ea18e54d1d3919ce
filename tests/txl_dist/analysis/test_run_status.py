"""`txl status`: what the files of a run say, without changing them."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from data_pipeline.system.files import try_lock
from tests.support.commands import run_txl
from txl_dist.analysis import run_status
from txl_dist.analysis.run_status import find_runs, read_status, status_lines
from txl_dist.checkpoint.attempts import FOLDER, Attempt, AttemptRecord
from txl_dist.errors import ConfigError
from txl_dist.runtime.heartbeat import Heartbeat, HeartbeatFile
from txl_dist.tracking.tracker import STATE, TrackingState
from txl_dist.training.goodput import GoodputFile

UP = "12:00:00 rank 0 is up\n"
STEP = "12:00:05 step 30 | loss 3.0 | ppl 20 | tok/s 1,000 | eta 1:02:03 | lr 1e-3\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "books"
    (path / "logs").mkdir(parents=True)
    (path / "config.yaml").write_text("training:\n  num_steps: 40\n")
    lines = [{"step": n, "loss": 4 - n / 30, "tokens_per_second": 10.0 * n} for n in (10, 20, 30)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "metrics.jsonl").write_text(text + '{"step": 31, "lo')
    (path / "checkpoints" / "step-00000020").mkdir(parents=True)
    record = AttemptRecord.of_this_process(number=3, launch_id="x")
    Attempt(record, path / FOLDER).add()
    return path


def write_log(run: Path, *lines: str) -> None:
    (run / "logs" / "rank-0.log").write_text("".join(lines))


def beat(number: int, *, host: str) -> Heartbeat:
    return Heartbeat(
        rank=0, host=host, pid=1, number=number, time=0.0, activity="step 31", span="forward",
        collective=None, seconds=1.0, stack=(),
    )  # fmt: skip


def test_a_loss_that_is_not_finite_is_null_in_json(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"step": 31, "loss": "nan", "tokens_per_second": "inf"}\n')
    (status,) = read_status([run])
    values = json.loads(json.dumps(status.to_json(), allow_nan=False))
    assert (values["step"], values["loss"], values["tokens_per_second"]) == (31, None, None)
    assert "loss nan" in next(status_lines(status))


@pytest.mark.parametrize(
    ("last", "state"),
    [
        ("12:01:00 finished at step 40\n", "ended"),
        ("12:01:00 stopped on request after step 30; everything is saved.\n", "stopped"),
        ("12:01:00 DivergedError: the loss of step 31 is nan\n", "failed"),
        ("", "lost"),
    ],
)
def test_a_run_without_processes_has_ended_as_its_log_says(
    run: Path, last: str, state: str
) -> None:
    write_log(run, UP, STEP, last)
    (status,) = read_status([run])
    assert status.state == state
    assert (status.step, status.num_steps, status.attempt) == (30, 40, 3)
    assert status.checkpoint == str(run / "checkpoints" / "step-00000020")
    assert (status.log is not None) == (state in ("failed", "lost"))
    error = "DivergedError: the loss of step 31 is nan"
    assert status.error == (error if state == "failed" else None)


@contextmanager
def held(run: Path) -> Iterator[None]:
    """The lock of a run in progress."""
    descriptor = os.open(run / "lock", os.O_RDWR | os.O_CREAT)
    assert try_lock(descriptor)
    yield
    os.close(descriptor)


@pytest.fixture
def locked(run: Path) -> Iterator[None]:
    with held(run):
        yield


@pytest.mark.parametrize("stop", [None, "12:01:00 stopped on request after step 34; saved\n"])
def test_the_step_is_the_last_one_trained_and_the_only_one(run: Path, stop: str | None) -> None:
    """Step lines are ten steps apart; goodput.json has the step in progress and that of a stop."""
    goodput = GoodputFile(
        updated=0.0, step=34, restarts=1, lost_steps=0, is_complete=False, seconds={}, productive={}
    )
    (run / "goodput.json").write_text(goodput.model_dump_json())
    write_log(run, UP, STEP, stop or "")
    HeartbeatFile(run, rank=0).write(beat(1, host=socket.gethostname()))
    with held(run) if stop is None else nullcontext():
        (status,) = read_status([run])
    text = "\n".join(status_lines(status))
    assert status.step == 34
    assert set(re.findall(r"step (\d+)", text)) == {"34"}, text
    assert "1 restart after" in text


def test_a_run_that_cannot_be_read_does_not_hide_the_others(run: Path, tmp_path: Path) -> None:
    write_log(run, UP, STEP, "12:01:00 finished at step 40\n")
    other = tmp_path / "runs" / "of somebody else"
    (other / "logs" / "rank-0.log").mkdir(parents=True)  # root cannot read it, either
    code, output = run_txl("status", other, run)
    assert code == 0
    assert (
        f"{other}: unreadable\n  {other}/logs/rank-0.log cannot be read: Is a directory" in output
    )
    assert f"{run}: ended" in output


@pytest.mark.usefixtures("locked")
def test_a_run_that_delivers_its_last_metrics_has_ended(run: Path) -> None:
    write_log(run, UP, STEP, "12:01:00 finished at step 40\n")
    assert read_status([run])[0].state == "ended"


@pytest.mark.usefixtures("locked")
def test_a_locked_run_is_running_once_it_has_stepped(run: Path) -> None:
    write_log(run, UP, "12:00:01 the model is built\n")
    assert read_status([run])[0].state == "starting"
    assert read_status([run])[0].doing == "the model is built"
    write_log(run, UP, STEP)
    HeartbeatFile(run, rank=0).write(beat(1, host="elsewhere"))
    (status,) = read_status([run])
    assert (status.state, status.doing, status.host) == ("running", "forward", "elsewhere")
    assert next(status_lines(status)).endswith(
        "running, step 30 of 40 (75%), loss 3.0000, 300 tokens/s, 1:02:03 left"
    )


def test_a_run_of_another_host_lives_if_a_heartbeat_changes(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lock of another host is seen, and no clock is compared."""
    monkeypatch.setattr(run_status, "POLL_SECONDS", 0.01)
    write_log(run, UP, STEP)
    files, watched = HeartbeatFile(run, rank=0), []
    files.write(beat(1, host="elsewhere"))
    timer = threading.Timer(0.1, files.write, [beat(2, host="elsewhere")])
    timer.start()
    (status,) = read_status([run], wait=watched.extend)
    timer.join()
    assert (status.state, watched) == ("running", [run])
    monkeypatch.setattr(run_status, "SILENT_SECONDS", 0.05)
    assert read_status([run])[0].state == "lost"


def test_a_dead_process_of_this_host_is_not_waited_for(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(run, UP, STEP)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setattr(run_status.socket, "gethostname", lambda: "here")
    dead = beat(1, host="here").model_copy(update={"pid": ended.pid})
    HeartbeatFile(run, rank=0).write(dead)
    watched: list[Path] = []
    assert read_status([run], wait=watched.extend)[0].state == "lost"
    assert watched == []


def test_nothing_is_changed_and_json_has_the_page_of_mlflow(run: Path) -> None:
    write_log(run, UP, STEP, "12:01:00 finished at step 40\n")
    TrackingState(key="k", server=None, experiment="e", run_id="f00").save(run / STATE)
    before = {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]}
    code, output = run_txl("status", run, "--json")
    (status,) = json.loads(output)["runs"]
    assert code == 0
    database = f"sqlite:///{run.parent / 'mlflow.db'}"
    assert status["mlflow_command"] == f"mlflow ui --backend-store-uri {database}"
    assert {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]} == before


def test_runs_below_a_folder_are_found_the_newest_last(run: Path, tmp_path: Path) -> None:
    deeper = tmp_path / "runs" / "sweep" / "a"
    deeper.mkdir(parents=True)
    (deeper / "metrics.jsonl").write_text("")
    os.utime(deeper / "metrics.jsonl", (1, 1))
    assert find_runs(tmp_path / "runs") == [deeper, run]
    assert find_runs(tmp_path / "missing") == []


def test_a_directory_that_is_no_run_is_refused_and_damage_is_not(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory"):
        read_status([tmp_path])
    for name in ("metrics.jsonl", "config.yaml", "goodput.json", STATE):
        (run / name).write_bytes(b"\xff{")
    (status,) = read_status([run])
    assert (status.state, status.step, status.num_steps) == ("lost", None, None)
