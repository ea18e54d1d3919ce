"""Trackers with real sender processes, and what they have delivered."""

import time
from collections.abc import Callable
from pathlib import Path

from txl_dist.config.run_config import DataConfig, RunConfig, TrackingConfig, TrainingConfig
from txl_dist.tracking.tracker import Tracker

from .conftest import (
    recorded_steps,
)


def tracking_config(run_dir: Path, uri: str | None = None, *, enabled: bool = True) -> RunConfig:
    return RunConfig(
        directory=str(run_dir),
        data=DataConfig(path="data/none"),
        training=TrainingConfig(num_steps=10),
        tracking=TrackingConfig(uri=uri, experiment="tests", enabled=enabled),
    )


def wait_for(condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.25)  # reading the SQLite file blocks the server that writes to it


def senders_of(run_dir: Path) -> list[int]:
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


def delivered_steps(run_dir: Path, tracker: Tracker) -> list[int]:
    return recorded_steps(run_dir.parent / "mlflow.db", tracker.run_id or "")
