"""The sender as a command: what was not delivered is delivered by `txl track sync`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import run_txl
from txl_dist.tracking.tracker import TrackingState, child_environment

from .conftest import (
    MlflowServer,
    recorded_steps,
    request_for,
    tags_of,
    write_steps,
)

SENDER = [sys.executable, "-m", "txl_dist.tracking.sender"]


def test_sync_delivers_what_an_ended_run_did_not(
    run_dir: Path, server: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_steps(run_dir, range(1, 11))
    request = request_for(server.uri.replace("://", "://user:CANARY@"))
    command = [*SENDER, str(run_dir), "--poll-seconds", "0.1", "--flush-seconds", "0.2"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=child_environment(), **pipes) as sender:
        assert sender.stdin is not None
        assert sender.stdout is not None
        sender.stdin.write(f"{request.to_json()}\n".encode())
        sender.stdin.flush()
        warning = sender.stdout.readline()
        stdout, stderr = sender.communicate(b"end preempted\n")
    assert sender.returncode == 75
    assert b"***" in warning
    assert b"CANARY" not in warning + stdout + stderr
    assert all(b"CANARY" not in path.read_bytes() for path in run_dir.rglob("*") if path.is_file())

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)  # MLflow sets it in its server
    code, output = run_txl("track", "sync", run_dir)
    assert code == 2
    assert "credentials are not stored" in output
    server.open()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    code, output = run_txl("track", "sync", run_dir, "--json")
    assert code == 0, output
    state = TrackingState.load(run_dir / "tracking.json")
    assert state is not None
    assert state.delivered
    assert recorded_steps(server.database, state.run_id or "") == list(range(1, 11))
    assert tags_of(server.database, state.run_id or "")["txl.status"] == "preempted"
    expected = {"run": str(run_dir), "mlflow_run_id": state.run_id, "status": "preempted"}
    assert json.loads(output) == {**expected, "delivered": True}


def test_sync_of_a_directory_without_tracking_is_refused_by_name(tmp_path: Path) -> None:
    code, message = run_txl("track", "sync", tmp_path)
    assert code == 2
    assert str(tmp_path) in message
    assert "tracking.enabled" in message


SLOW_IMPORT = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "mlflow":
            time.sleep(7)
sys.meta_path.insert(0, Slow())
"""


@pytest.mark.slow
def test_the_time_of_a_sync_starts_after_the_import_and_can_be_set(
    run_dir: Path, server: MlflowServer, tmp_path: Path
) -> None:
    """A slow import of mlflow does not count; a failing server uses the whole time."""
    write_steps(run_dir, range(1, 11))
    request_for(server.uri).save(run_dir / "logs/tracking-request.json")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(SLOW_IMPORT)
    path = f"{tmp_path / 'site'}{os.pathsep}{child_environment()['PYTHONPATH']}"

    def sync(seconds: float, environment: dict[str, str]) -> int:
        command = [*SENDER, str(run_dir), "--sync", "--flush-seconds", str(seconds)]
        return subprocess.run(command, env=environment, check=False, capture_output=True).returncode

    assert sync(0.5, child_environment()) == 75
    server.open()
    assert sync(1, {**child_environment(), "PYTHONPATH": path}) == 0
    state = TrackingState.load(run_dir / "tracking.json")
    assert state is not None
    assert recorded_steps(server.database, state.run_id or "") == list(range(1, 11))
