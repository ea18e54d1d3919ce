"""An evaluation becomes a child run of its training run."""

import logging
from pathlib import Path

import pytest

from txl_dist.tracking.evaluation import log_evaluations
from txl_dist.tracking.state import TrackingState

from .conftest import (
    MlflowServer,
    delivery_for,
    recorded_steps,
    run_ids,
    status_of,
    tags_of,
)


def test_an_evaluation_is_a_child_run_and_an_unreachable_server_only_a_warning(
    run_dir: Path, server: MlflowServer, caplog: pytest.LogCaptureFixture
) -> None:
    assert not log_evaluations([(run_dir, {"nats": 1.0})])  # never tracked
    server.open()
    delivery_for(run_dir, server.uri).pump()
    state = TrackingState.load(run_dir / "tracking.json")
    assert state is not None
    result = {"nats": 12.5, "tokens_scored": 4, "bits_per_byte": None, "split": "valid"}
    assert log_evaluations([(run_dir, result)])
    (child,) = [run for run in run_ids(server.database) if _parent(server, run) == state.run_id]
    assert recorded_steps(server.database, child, "nats") == [0]
    assert status_of(server.database, child) == "FINISHED"

    server.close()
    with caplog.at_level(logging.WARNING):
        assert not log_evaluations([(run_dir, result)], timeout_seconds=0.2)
    assert "was not recorded" in caplog.text


def _parent(server: MlflowServer, run_id: str) -> str | None:
    return tags_of(server.database, run_id).get("mlflow.parentRunId")
