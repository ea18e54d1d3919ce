"""Promise 7: training never waits for MLflow, and every point arrives once after an outage."""

import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from data_pipeline.system.files import is_locked
from tests.support import commands
from tests.txl_dist.tracking.conftest import (
    MlflowServer,
    assert_delivered,
    delivered_steps,
    recorded_steps,
    run_ids,
    senders_of,
    status_of,
    tags_of,
    tracking_config,
    write_steps,
)
from txl_dist.tracking.journal import MetricsJournal
from txl_dist.tracking.process import TrackingProcess
from txl_dist.tracking.tracker import LOCK, REQUEST, TrackingRequest

# Reading the SQLite file blocks the server that writes to it.
wait_until = partial(commands.wait_until, poll_seconds=0.25)


TRAINING = """
import os, sys, time
from pathlib import Path
from txl_dist.config.run_config import *
from txl_dist.tracking.journal import MetricsJournal
from txl_dist.tracking.process import TrackingProcess
run_dir = Path(sys.argv[1])
config = RunConfig(directory=sys.argv[1], data=DataConfig(path="x"),
    training=TrainingConfig(num_steps=9), tracking=TrackingConfig(experiment="tests"))
tracker = TrackingProcess(run_dir, config)
journal = MetricsJournal(run_dir / "metrics.jsonl")
for step in range(1, 51):
    journal.write({"step": step, "tokens": step, "time": time.time(), "loss": 1.0})
while tracker.run_id is None:
    time.sleep(0.05)
if os.fork() == 0:  # a worker that holds every open pipe and outlives its parent
    time.sleep(20)
    os._exit(0)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.fault_row(2)
@pytest.mark.fault
def test_after_a_sigkill_of_training_its_sender_delivers_and_ends(run_dir: Path) -> None:
    """And a resume, started immediately, delivers into one complete MLflow run."""
    with subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(run_dir)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as training:
        assert training.stdout is not None
        assert training.stdout.readline() == b"ready\n"
        training.kill()
        with MetricsJournal(run_dir / "metrics.jsonl") as journal:
            journal.truncate_after(40)
        tracker = TrackingProcess(run_dir, tracking_config(run_dir))
        wait_until(lambda: len(senders_of(run_dir)) == 1)
        os.killpg(training.pid, signal.SIGKILL)  # the worker
    database = run_dir.parent / "mlflow.db"
    write_steps(run_dir, range(41, 61))
    tracker.close("preempted", timeout_seconds=60)

    assert delivered_steps(run_dir, tracker) == list(range(1, 61))
    assert tags_of(database, tracker.run_id or "")["txl.status"] == "preempted"
    for superseded in set(run_ids(database)) - {tracker.run_id}:  # if steps above 40 were sent
        assert tags_of(database, superseded)["mlflow.parentRunId"] == tracker.run_id
    assert senders_of(run_dir) == []


@pytest.mark.fault_row(31, 32)
def test_a_server_that_is_down_does_not_delay_training_and_gets_everything_later(
    run_dir: Path, server: MlflowServer
) -> None:
    (run_dir / "logs").mkdir()
    rank_log = run_dir / "logs" / "rank-0.log"
    rank_log.touch()
    began = time.monotonic()
    tracker = TrackingProcess(run_dir, tracking_config(run_dir, server.uri))
    write_steps(run_dir, range(1, 1001))
    assert time.monotonic() - began < 1.0
    wait_until(lambda: "cannot be reached" in rank_log.read_text())
    server.open()
    wait_until(lambda: tracker.run_id is not None)
    wait_until(lambda: len(recorded_steps(server.database, tracker.run_id or "")) == 1000)
    server.fault = lambda path, body: "500"
    write_steps(run_dir, range(1001, 1101))
    time.sleep(1.2)
    server.fault = None
    tracker.close("diverged", timeout_seconds=60)
    assert_delivered(server.database, run_dir, 1100, "FAILED")
    assert len(rank_log.read_text().splitlines()) == 1


@pytest.mark.fault_row(32)
def test_a_server_that_never_responds_delays_neither_training_nor_its_end(
    run_dir: Path, server: MlflowServer
) -> None:
    """It accepts connections. Each call waits for 20 s, in the process of the sender."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", server.port))
        silent.listen()
        began = time.monotonic()
        tracker = TrackingProcess(run_dir, tracking_config(run_dir, server.uri))
        write_steps(run_dir, range(1, 1001))
        assert time.monotonic() - began < 1.0
        connection, _ = silent.accept()  # the sender waits now
        tracker.close("finished", timeout_seconds=0.5)
        assert time.monotonic() - began < 20
        connection.close()
    server.open()
    wait_until(lambda: senders_of(run_dir) == [])
    assert_delivered(server.database, run_dir, 1000)


def test_training_does_not_wait_until_a_sender_reads_a_large_request(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender hangs before its imports; the request is larger than the buffer of a pipe."""
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(5)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    tags = {"large": "x" * 300_000}
    began = time.monotonic()
    tracker = TrackingProcess(run_dir, tracking_config(run_dir), tags=tags)
    tracker.close("finished", timeout_seconds=0)
    assert time.monotonic() - began < 4
    assert is_locked(run_dir / LOCK), "the launcher sees that it is there"
    wait_until((run_dir / REQUEST).exists)
    request = TrackingRequest.load(run_dir / REQUEST)
    assert request is not None
    assert request.tags["txl.large"] == tags["large"]
    wait_until(lambda: senders_of(run_dir) == [])
    assert status_of(run_dir.parent / "mlflow.db", tracker.run_id or "") == "FINISHED"
