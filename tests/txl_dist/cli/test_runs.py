"""`txl checkpoint`, `txl status` and `txl report` of a trained run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.commands import run_txl
from tests.support.running_mean import overrides_of
from tests.support.training_runs import NO_EVALUATION, TinyRuns, train
from txl_dist.checkpoint.manifest import file_name, load_checkpoint_manifest
from txl_dist.model.memory import memory_kind


def test_checkpoints_are_listed_with_what_they_hold(run: Path) -> None:
    code, output = run_txl("checkpoint", "list", run, "--json")
    assert code == 0
    listed = json.loads(output)["checkpoints"]
    assert [row["step"] for row in listed] == [18, 20]
    assert listed[-1]["tokens"] == 300
    assert [row["pointers"] for row in listed][-1][0] == "LATEST"
    assert sum("BEST" in row["pointers"] for row in listed) == 1
    assert listed[0]["nats_per_token"] is None, "step 18 was not evaluated"
    assert 1 < listed[1]["nats_per_token"] < 6
    _, text = run_txl("checkpoint", "list", run)
    assert "LATEST" in text.splitlines()[-1]
    assert f"validation loss {listed[1]['nats_per_token']:.4f}" in text.splitlines()[-1]
    assert "LATEST" not in text.splitlines()[0]


@pytest.mark.parametrize("kind", ["compressive", "tokens"])
def test_the_listed_bytes_have_the_memory_of_every_lane(tiny: TinyRuns, kind: str) -> None:
    steps = ("training.num_steps=3", "optimizer.warmup_steps=1")
    spec = tiny.spec(tiny.path, NO_EVALUATION, *steps, *overrides_of(kind))
    assert tiny.ranks(1).run(train, spec) == [0]
    (row,) = json.loads(run_txl("checkpoint", "list", tiny.path, "--json")[1])["checkpoints"]
    files = load_checkpoint_manifest(tiny.path / "checkpoints" / "step-00000003").files
    memory_bytes = files[file_name("memory", 0)].bytes
    lanes = spec.config.data.num_lanes
    state = memory_kind(replace(spec.config.model, vocab_size=257)).empty(1)
    per_lane = sum(tensor.nbytes for tensor in state.row(0).values())
    # And names and shapes.
    assert lanes * per_lane < memory_bytes < lanes * (per_lane + 2000)
    assert row["bytes"] == sum(entry.bytes for entry in files.values())
    assert row["bytes"] > memory_bytes


def test_status_and_report_of_a_trained_run_are_read_from_its_events(
    run: Path, tmp_path: Path
) -> None:
    (status,) = json.loads(run_txl("status", run, "--json")[1])["runs"]
    assert (status["state"], status["step"], status["num_steps"]) == ("ended", 20, 20)
    page = tmp_path / "report.html"
    assert run_txl("report", run, "--out", page)[0] == 0
    for text in ("checkpoint of step 20", "evaluation at step 20", "finished at step 20"):
        assert text in page.read_text(), text
