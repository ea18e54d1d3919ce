"""The tracker with real sender processes: no delay, no lost or doubled point, no process left."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tests.txl_dist.tracking.real_senders import (
    tracking_config,
)
from txl_dist.errors import DivergedError, PreemptedError
from txl_dist.tracking.state import child_environment
from txl_dist.tracking.tracker import Tracker


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
    tracker = Tracker.start(run_dir, tracking_config(run_dir, enabled=False))
    tracker.__exit__(type(error), error, None)
    assert statuses == [status]


def test_tracking_that_is_off_or_cannot_start_does_not_raise(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Tracker.start(run_dir, tracking_config(run_dir, enabled=False)) as tracker:
        assert tracker.run_id is None
    assert not list(run_dir.iterdir())

    (run_dir / "logs").write_text("a file where the directory should be")
    with caplog.at_level(logging.WARNING):
        tracker = Tracker.start(run_dir, tracking_config(run_dir))
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
