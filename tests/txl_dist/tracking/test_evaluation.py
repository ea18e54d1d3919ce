"""An evaluation becomes a child run of its training run."""

import logging
import shutil
from pathlib import Path

import pytest

from txl_dist.tracking.process import log_evaluations
from txl_dist.tracking.tracker import TrackingState

from .conftest import (
    MlflowServer,
    recorded_steps,
    run_id_of,
    run_ids,
    sender_for,
    status_of,
    tags_of,
)


def test_an_evaluation_is_a_child_run_and_an_unreachable_server_only_a_warning(
    run_dir: Path, server: MlflowServer, caplog: pytest.LogCaptureFixture
) -> None:
    assert not log_evaluations([(run_dir, {"nats": 1.0})])  # never tracked
    server.open()
    sender_for(run_dir, server.uri).pump()
    state = TrackingState.load(run_dir / "tracking.json")
    assert state is not None
    result = {
        "nats": 12.5,
        "tokens_scored": 4,
        "bits_per_byte": None,
        "split": "valid",
        "protocol": "split valid, 4 tokens scored",
        "details": {"interval": {"level": 0.95, "perplexity": [2.0, 3.0], "bits_per_byte": None}},
    }
    assert log_evaluations([(run_dir, result)])
    (child,) = [run for run in run_ids(server.database) if _parent(server, run) == state.run_id]
    assert recorded_steps(server.database, child, "nats") == [0]
    assert recorded_steps(server.database, child, "perplexity_low") == [0]
    assert tags_of(server.database, child)["txl.protocol"] == result["protocol"]
    assert status_of(server.database, child) == "FINISHED"

    server.close()
    with caplog.at_level(logging.WARNING):
        assert not log_evaluations([(run_dir, result)], timeout_seconds=0.2)
    assert "was not recorded" in caplog.text


def test_several_evaluations_are_children_of_their_training_runs(
    run_dir: Path, server: MlflowServer
) -> None:
    server.open()
    sender_for(run_dir, server.uri).pump()
    other = run_dir.with_name("other")  # a second training run of the same experiment
    shutil.copytree(run_dir, other)
    sender_for(other, server.uri).pump()
    before = set(run_ids(server.database))
    scored = [(run, {"nats": 12.5, "split": split}) for run in (run_dir, other) for split in "ab"]
    assert log_evaluations(scored)
    new = set(run_ids(server.database)) - before
    parents = sorted(str(_parent(server, run)) for run in new)
    assert parents == sorted([run_id_of(run_dir), run_id_of(other)] * 2)
    assert {status_of(server.database, run) for run in new} == {"FINISHED"}


def _parent(server: MlflowServer, run_id: str) -> str | None:
    return tags_of(server.database, run_id).get("mlflow.parentRunId")
