"""The tracker with real sender processes: no delay, no lost or doubled point, no process left."""

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from txl_dist.config.run_config import DataConfig, RunConfig, TrackingConfig, TrainingConfig
from txl_dist.errors import DivergedError, PreemptedError
from txl_dist.tracking.state import child_environment
from txl_dist.tracking.tracker import Tracker

from .conftest import (
    recorded_steps,
)


def _config(run_dir: Path, uri: str | None = None, *, enabled: bool = True) -> RunConfig:
    return RunConfig(
        directory=str(run_dir),
        data=DataConfig(path="data/none"),
        training=TrainingConfig(num_steps=10),
        tracking=TrackingConfig(uri=uri, experiment="tests", enabled=enabled),
    )


def _wait_for(condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.05)


def _senders(run_dir: Path) -> list[int]:
    """The living sender processes of this run directory."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if b"txl_dist.tracking.sender" in arguments and str(run_dir).encode() in arguments:
            pids += [int(entry.name)] if state != "Z" else []
    return pids


def _steps(run_dir: Path, tracker: Tracker) -> list[int]:
    return recorded_steps(run_dir.parent / "mlflow.db", tracker.run_id or "")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "finished"),
        (PreemptedError(), "preempted"),
        (DivergedError(), "diverged"),
        (KeyboardInterrupt(), "interrupted"),
        (RuntimeError(), "failed"),
    ],
)
def test_the_status_follows_from_the_error_that_ends_the_run(
    run_dir: Path, error: BaseException | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses: list[str] = []
    monkeypatch.setattr(Tracker, "close", lambda self, status: statuses.append(status))
    tracker = Tracker.start(run_dir, _config(run_dir, enabled=False))
    tracker.__exit__(type(error), error, None)
    assert statuses == [status]


def test_tracking_that_is_off_or_cannot_start_does_not_raise(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Tracker.start(run_dir, _config(run_dir, enabled=False)) as tracker:
        assert tracker.run_id is None
    assert not list(run_dir.iterdir())

    (run_dir / "logs").write_text("a file where the directory should be")
    with caplog.at_level(logging.WARNING):
        tracker = Tracker.start(run_dir, _config(run_dir))
        tracker.close("finished")
        tracker.close("finished")
    assert "tracking is off" in caplog.text


def test_importing_the_training_side_imports_no_mlflow() -> None:
    code = (
        "import sys, txl_dist.tracking.tracker, txl_dist.tracking.journal,"
        " txl_dist.tracking.evaluation;"
        "assert not {'mlflow', 'pydantic', 'torch'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], env=child_environment(), check=True)
