"""The processes of tracking: no delay, no lost or doubled point, no process left; evaluations."""

import json
import logging
import os
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.commands import num_lines, start_txl, txl, wait_until
from tests.support.training_runs import NO_EVALUATION, TINY
from tests.txl_dist.tracking.conftest import (
    MlflowServer,
    assert_delivered,
    senders_of,
    tracking_config,
    write_steps,
)
from txl_dist.errors import DivergedError, FencedError, PreemptedError
from txl_dist.tracking.process import TrackingProcess
from txl_dist.tracking.tracker import TrackingRequest, TrackingState
from txl_dist.training.rank import start_tracker
from txl_dist.training.state import TrainState


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "finished"),
        (PreemptedError(), "preempted"),
        (DivergedError(), "diverged"),
        (KeyboardInterrupt(), "interrupted"),
        (FencedError(), "running"),
        (RuntimeError(), "failed"),
    ],
)
def test_the_status_follows_from_the_error_that_ends_the_run(
    run_dir: Path, error: BaseException | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses: list[str] = []
    monkeypatch.setattr(TrackingProcess, "close", lambda self, status: statuses.append(status))
    monkeypatch.setattr(TrackingProcess, "_start_sender", lambda self: None)
    tracker = TrackingProcess(run_dir, tracking_config(run_dir))
    tracker.__exit__(type(error), error, None)
    assert statuses == [status]


def test_tracking_that_is_off_or_cannot_start_does_not_raise(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tracking_config(run_dir, enabled=False)
    start: Any = SimpleNamespace(config=config, world=SimpleNamespace(is_rank_zero=True))
    assert start_tracker(start, TrainState()) is None
    assert not list(run_dir.iterdir())

    (run_dir / "logs").write_text("a file where the directory should be")
    with caplog.at_level(logging.WARNING):
        tracker = TrackingProcess(run_dir, tracking_config(run_dir))
        tracker.close("finished")
        tracker.close("finished")
    assert "tracking is off" in caplog.text
    assert tracker.run_id is None


def _train(dataset: Path, run: Path, uri: str, *settings: object) -> tuple[object, ...]:
    return (
        *("train", TINY, f"data.path={dataset}", f"directory={run}", "--on", "processes"),
        f"tracking={{enabled: true, experiment: tests, uri: '{uri}'}}",
        *settings,
    )


def test_the_end_is_delivered_before_the_launcher_ends(
    dataset: Path, run_dir: Path, server: MlflowServer
) -> None:
    """As in a container: all processes end with `txl train`. A request takes a while."""
    server.open()
    server.fault = lambda path, body: time.sleep(0.2) or ""
    with start_txl(*_train(dataset, run_dir, server.uri, NO_EVALUATION)) as training:
        output, _ = training.communicate(timeout=300)
        for sender in senders_of(run_dir):
            os.kill(sender, signal.SIGKILL)
    assert training.returncode == 0, output
    assert_delivered(server.database, run_dir, 20, output=output)


@pytest.mark.fault
@pytest.mark.fault_row(32)
def test_a_sender_that_died_during_the_run_is_replaced_at_its_end(
    dataset: Path, run_dir: Path, server: MlflowServer
) -> None:
    server.open()
    settings = (NO_EVALUATION, "training.num_steps=400", "training.grace_seconds=100")
    with start_txl(*_train(dataset, run_dir, server.uri, *settings)) as training:
        wait_until(lambda: num_lines(run_dir / "metrics.jsonl") > 5)
        (sender,) = senders_of(run_dir)
        os.kill(sender, signal.SIGKILL)
        output, _ = training.communicate(timeout=300)
    assert training.returncode == 0, output
    assert_delivered(server.database, run_dir, 400, output=output)


@pytest.mark.fault
@pytest.mark.fault_row(32)
def test_the_wait_at_the_end_has_a_limit_and_the_rest_is_delivered_by_the_next_start(
    dataset: Path, run_dir: Path, server: MlflowServer
) -> None:
    settings = (NO_EVALUATION, "training.grace_seconds=0.5")
    ended = txl(*_train(dataset, run_dir, server.uri, *settings), timeout_seconds=300)
    assert ended.returncode == 0, ended.stderr
    assert f"txl track sync {run_dir}" in ended.stdout
    for sender in senders_of(run_dir):
        os.kill(sender, signal.SIGKILL)
    server.open()
    settings = (NO_EVALUATION, "training.grace_seconds=200")
    again = txl(*_train(dataset, run_dir, server.uri, *settings), timeout_seconds=300)
    assert "this run is finished" in again.stdout
    assert_delivered(server.database, run_dir, 20)


@pytest.mark.fault
@pytest.mark.fault_row(32)
@pytest.mark.parametrize("on", ["processes", "ray"])
def test_a_stop_does_not_wait_longer_than_its_grace_period(
    dataset: Path, run_dir: Path, on: str
) -> None:
    """The server accepts connections and never responds."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = (
            *(NO_EVALUATION, "training.num_steps=100000", "training.grace_seconds=15"),
            "--on",
            on,
        )
        with start_txl(*_train(dataset, run_dir, uri, *settings)) as training:
            wait_until(lambda: num_lines(run_dir / "metrics.jsonl") > 5)
            training.send_signal(signal.SIGTERM)
            output, _ = training.communicate(timeout=120)
        for sender in senders_of(run_dir):
            os.kill(sender, signal.SIGKILL)
    assert training.returncode == 75, output
    assert "MLflow does not have everything yet" in output


# --- trackers of other packages, and the files about a tracked run --------------------------------

TRACKER = """
import json

class LinesTracker:
    def __init__(self, uri, run_dir):
        self.path = uri.removeprefix("lines://")

    def write(self, *words):
        with open(self.path, "a") as file:
            print(json.dumps(words), file=file)

    def start(self, run):
        self.write("start", run.experiment, run.params["training.num_steps"])
        return run.key

    def recorded(self, run_id, metric):
        with open(self.path) as file:
            points = [line[1:] for line in map(json.loads, file) if line[0] == "point"]
        return {(step, ms) for name, step, ms in points if name == metric}

    def log(self, run_id, points):
        for point in points:
            self.write("point", point.metric, point.step, point.milliseconds)

    def end(self, run_id, status):
        self.write("end", status)
"""


def test_a_tracker_of_another_package_gets_every_point_once_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, run, written = tmp_path / "site", tmp_path / "run", tmp_path / "written"
    (site / "lines_tracker-1.dist-info").mkdir(parents=True)
    (site / "lines_tracker.py").write_text(TRACKER)
    (site / "lines_tracker-1.dist-info" / "entry_points.txt").write_text(
        "[txl.trackers]\nlines = lines_tracker:LinesTracker\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    run.mkdir()
    for status, steps in (("preempted", range(1, 4)), ("finished", range(4, 6))):
        write_steps(run, steps)
        tracker = TrackingProcess(run, tracking_config(run, f"lines://{written}"))
        tracker.close(status, timeout_seconds=120)
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    assert lines[0] == ["start", "tests", "10"]
    assert [line[2] for line in lines if line[:2] == ["point", "loss"]] == [1, 2, 3, 4, 5]
    assert [line[1] for line in lines if line[0] == "end"] == ["preempted", "finished"]


@pytest.mark.parametrize("content", ["", "{", "null", "[1]", "{}", "[" * 10**5])
def test_a_damaged_file_is_read_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tracking.json"
    path.write_text(content)
    assert TrackingState.load(path) is None


def test_a_request_of_an_earlier_version_is_read_without_its_unknown_fields(tmp_path: Path) -> None:
    path = tmp_path / "tracking-request.json"
    request = TrackingRequest(server=None, experiment="tests", params={"a": "1"})
    path.write_text(json.dumps({**json.loads(request.model_dump_json()), "new_run_key": "0123"}))
    assert TrackingRequest.load(path) == request
