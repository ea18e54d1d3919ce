"""`txl status`: what the files of a run say, without changing them."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.system.files import try_lock
from tests.support.commands import run_txl
from tests.support.run_directories import event, start, write_events
from txl_dist.analysis.run_status import find_runs, read_status, status_lines
from txl_dist.errors import ConfigError
from txl_dist.events import EVENTS
from txl_dist.runtime.waiting import Heartbeat, write_heartbeat
from txl_dist.tracking.tracker import STATE, TrackingState
from txl_dist.training import spec

UP = (event("ranks_started"), start(0, num_steps=40), event("first_batch", "first batch"))
STEP = event("first_line", "first step line", step=10)
FINISHED = event("finished", "finished at step 40", step=40)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "books"
    (path / "logs").mkdir(parents=True)
    (path / "config.yaml").write_text("training:\n  num_steps: 40\n")
    lines = [
        {"step": n, "loss": 4 - n / 30, "tokens_per_second": 10.0 * n, "seconds_left": 3723.0}
        for n in (10, 20, 30)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "metrics.jsonl").write_text(text + '{"step": 31, "lo')
    (path / "checkpoints" / "step-00000020").mkdir(parents=True)
    return path


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


LOST = event("rank_lost", "LostRankError: rank 1 is gone", rank=0)
ERROR = event("error", "DivergedError: the loss of step 31 is nan", rank=1)
RESTARTED = (event("restart", "rank 1 was killed; restart 1"), *UP)


@pytest.mark.parametrize(
    ("events", "state", "step", "doing"),
    [
        ([FINISHED], "ended", 40, "finished at step 40"),
        ([event("stopped", "at 34", step=34)], "stopped", 34, "at 34"),
        ([event("stopped", "no rank was up")], "stopped", 30, "no rank was up"),
        ([LOST, ERROR, event("failed", "all ended")], "failed", 30, ERROR["text"]),
        ([event("failed", "no rank was up")], "failed", 30, "no rank was up"),
        ([], "lost", 30, "no last word after: first step line"),
        ([LOST], "lost", 30, "LostRankError: rank 1 is gone"),
        ([ERROR, *RESTARTED], "lost", 30, "no last word after: first batch"),
    ],
)
def test_a_run_without_processes_has_ended_as_its_events_say(
    run: Path, events: list[dict[str, Any]], state: str, step: int, doing: str
) -> None:
    write_events(run, *UP, STEP, *events)
    (status,) = read_status([run])
    assert (status.state, status.step, status.doing) == (state, step, doing)
    assert (status.num_steps, status.attempt, status.host) == (40, 1, "a")
    assert status.checkpoint == str(run / "checkpoints" / "step-00000020")
    assert (status.log is not None) == (state in ("failed", "lost"))
    assert str(status.log).endswith("rank-1.log") == (doing == ERROR["text"])


def test_a_run_of_an_older_version_has_the_step_of_its_metrics(run: Path) -> None:
    (status,) = read_status([run])
    assert (status.state, status.step, status.attempt) == ("lost", 30, None)
    assert "an older version wrote it" in status.doing
    assert "None" not in "\n".join(status_lines(status))
    with held(run):
        assert read_status([run])[0].state == "running"


def test_a_run_that_has_gone_back_has_the_step_of_its_last_line_since(run: Path) -> None:
    """It has saved step 35, and returned to step 25."""
    back = event("rollback", "returned to step 25", step=25, reached_step=36)
    write_events(run, *UP, STEP, event("save", "saved", step=35), back)
    (status,) = read_status([run])
    assert status.step == 30


def test_a_late_score_of_an_older_step_does_not_lead_a_run_back(run: Path) -> None:
    """A resume appends the scores that the metrics lack."""
    torn = (run / "metrics.jsonl").read_text().rpartition("\n")[0]
    (run / "metrics.jsonl").write_text(torn + '\n{"step": 20, "valid/loss": 3.1}\n')
    (status,) = read_status([run])
    assert (status.step, status.loss) == (30, 3.0)


def test_a_run_whose_ranks_start_for_the_first_time_is_starting(run: Path) -> None:
    write_events(run, event("ranks_started", "2 ranks start"), attempt=0)
    with held(run):
        (status,) = read_status([run])
    assert (status.state, status.doing, status.num_steps) == ("starting", "2 ranks start", None)
    assert "None" not in "\n".join(status_lines(status))


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


@pytest.mark.usefixtures("locked")
def test_a_locked_run_is_running_once_it_has_stepped_until_it_has_finished(run: Path) -> None:
    write_events(run, *UP, STEP, *RESTARTED)
    (status,) = read_status([run])
    assert (status.state, status.doing, status.restarts) == ("starting", "first batch", 1)
    write_events(run, STEP)
    write_heartbeat(run, beat(1, host="elsewhere"))
    (status,) = read_status([run])
    assert (status.state, status.doing, status.host) == ("running", "forward", "elsewhere")
    assert next(status_lines(status)).endswith(
        "running, step 30 of 40 (75%), loss 3.0000, 300 tokens/s, 1:02:03 left"
    )
    write_events(run, FINISHED)
    assert read_status([run])[0].state == "ended", "it may deliver its last metrics"


def test_a_run_of_another_host_lives_if_a_heartbeat_changes(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lock of another host is seen, and no clock is compared."""
    monkeypatch.setattr(spec, "POLL_SECONDS", 0.01)
    write_events(run, *UP, STEP)
    write_heartbeat(run, beat(1, host="elsewhere"))
    timer = threading.Timer(0.1, write_heartbeat, [run, beat(2, host="elsewhere")])
    timer.start()
    (status,) = read_status([run])
    timer.join()
    assert status.state == "running"
    monkeypatch.setattr(spec, "SILENT_SECONDS", 0.05)
    assert read_status([run])[0].state == "lost"


def test_a_dead_process_of_this_host_is_not_waited_for(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_events(run, *UP, STEP)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setattr(spec.socket, "gethostname", lambda: "here")
    dead = beat(1, host="here").model_copy(update={"pid": ended.pid})
    write_heartbeat(run, dead)
    monkeypatch.setattr(spec, "SILENT_SECONDS", 600)
    assert read_status([run])[0].state == "lost"


def test_nothing_is_changed_and_json_has_the_page_of_mlflow(run: Path) -> None:
    write_events(run, *UP, STEP, FINISHED)
    TrackingState(key="k", server=None, experiment="e", run_id="f00").save(run / STATE)
    before = {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]}
    code, output = run_txl("status", run, "--json")
    (status,) = json.loads(output)["runs"]
    assert code == 0
    database = f"sqlite:///{run.parent / 'mlflow.db'}"
    assert status["mlflow_page"] == f"mlflow ui --backend-store-uri {database}"
    assert {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]} == before


def test_runs_below_a_folder_are_found_the_newest_last(run: Path, tmp_path: Path) -> None:
    deeper = tmp_path / "runs" / "sweep" / "a"
    deeper.mkdir(parents=True)
    for path in (run, deeper):
        (path / EVENTS).write_text("")
    os.utime(deeper / EVENTS, (1, 1))
    assert find_runs(tmp_path / "runs") == [deeper, run]
    assert find_runs(tmp_path / "missing") == []


def test_a_directory_that_is_no_run_is_refused_and_damage_is_not(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory"):
        read_status([tmp_path])
    for name in ("metrics.jsonl", "config.yaml", EVENTS, STATE):
        (run / name).write_bytes(b"\xff{")
    (status,) = read_status([run])
    assert (status.state, status.step, status.num_steps) == ("lost", None, None)
