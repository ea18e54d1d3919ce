"""Trackers with real sender processes, and what they have delivered."""

from pathlib import Path

import psutil

from txl_dist.config.data_config import DataConfig
from txl_dist.config.run_config import RunConfig
from txl_dist.config.training_config import TrackingConfig, TrainingConfig
from txl_dist.tracking.process import TrackingProcess

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


def senders_of(run_dir: Path) -> list[int]:
    """The living sender processes of this run directory."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if {"txl_dist.tracking.sender", str(run_dir)} <= set(process.info["cmdline"] or ())
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def delivered_steps(run_dir: Path, tracker: TrackingProcess) -> list[int]:
    return recorded_steps(run_dir.parent / "mlflow.db", tracker.run_id or "")
