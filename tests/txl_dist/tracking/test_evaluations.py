"""Scores of `txl eval` in MLflow: a run below the training run, once, also after an outage."""

import json
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_pipeline.system.files import open_descriptor, try_lock
from txl_dist.errors import CheckpointError
from txl_dist.tracking import evaluations, process
from txl_dist.tracking.evaluations import deliver_evaluations
from txl_dist.tracking.journal import MetricsJournal
from txl_dist.tracking.process import log_evaluations, send_metrics
from txl_dist.tracking.tracker import (
    LOCK,
    TrackingState,
    UnavailableError,
    directory_identity,
)

from .conftest import (
    START,
    MlflowServer,
    client_of,
    recorded_steps,
    request_for,
    run_id_of,
    run_ids,
    sender_for,
    state_of,
    status_of,
    tags_of,
    until_delivered,
    write_steps,
)

DIGEST = "0123456789abcdef" * 4


def _result(**changes: Any) -> dict[str, Any]:
    """Parts of a result that `txl eval` keeps."""
    return {
        "nats": 12.5,
        "nats_per_token": 3.125,
        "tokens_scored": 4,
        "perplexity": 2.5,
        "bits_per_byte": None,
        "split": "valid",
        "mem_len": 64,
        "mode": "exact",
        "tgt_len": 32,
        "model_sha256": DIGEST,
        "data": "/data/books",
        "data_sha256": DIGEST,
        "checkpoint": "run/checkpoints/step-00000005",
        "save_id": f"{5:032x}",
        "protocol": "split valid, 4 tokens scored",
        "details": {"interval": {"level": 0.95, "perplexity": [2.0, 3.0]}},
        **changes,
    }


def _children(database: Path, run_dir: Path) -> list[str]:
    """The MLflow runs below that of a run directory."""
    parent = run_id_of(run_dir)
    tags = {run: tags_of(database, run) for run in run_ids(database)}
    return [run for run in tags if tags[run].get("mlflow.parentRunId") == parent]


def _scores(database: Path, run_dir: Path) -> list[str]:
    """What was scored at step 5, once for each point of its nats below the run."""
    names = [f"{split}/mem_len_{n}" for split in ("a", "b", "valid") for n in (0, 64)]
    runs = _children(database, run_dir)
    assert {status_of(database, run) for run in runs} == {"FINISHED"}
    steps = {
        name: [recorded_steps(database, run, f"{name}/nats") for run in runs] for name in names
    }
    assert all(each in ([], [5]) for of_name in steps.values() for each in of_name)
    return sorted(name for name in names for each in steps[name] if each)


def _keep(run_dir: Path, **changes: Any) -> Path:
    """Write a result as `txl eval` does, under a name for its settings; returns the checkpoint."""
    result = _result(**changes)
    path = run_dir / "evaluations" / f"{result['split']}-{result['mem_len']:016x}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result))
    return run_dir / "checkpoints" / "step-00000005"


def test_an_evaluation_is_a_child_run_with_its_data_and_its_settings(
    run_dir: Path,
) -> None:
    database = run_dir.parent / "mlflow.db"
    write_steps(run_dir, range(1, 6))
    sender = sender_for(run_dir)
    sender.pump()
    _keep(run_dir)
    _keep(run_dir, mem_len=0, nats=14.0)
    sender.pump()

    names = {tags_of(database, r)["mlflow.runName"]: r for r in _children(database, run_dir)}
    assert sorted(names) == ["eval step 5: valid, mem_len 0", "eval step 5: valid, mem_len 64"]
    second = names["eval step 5: valid, mem_len 64"]
    tags = tags_of(database, second)
    assert tags["txl.kind"] == "evaluation"
    assert tags["mlflow.note.content"] == "split valid, 4 tokens scored"
    assert tags["mlflow.source.name"] == "txl eval"
    assert status_of(database, second) == "FINISHED"
    assert recorded_steps(database, second, "valid/mem_len_64/perplexity") == [5]
    run = client_of(run_dir).get_run(second)
    assert run.data.metrics["valid/mem_len_64/nats"] == 12.5
    assert (run.data.params["mem_len"], run.data.params["mode"]) == ("64", "exact")
    assert not {"details", "perplexity", "bits_per_byte", "save_id"} & run.data.params.keys()
    (data,) = run.inputs.dataset_inputs
    assert (data.dataset.name, data.tags[0].value) == ("books/valid", "evaluation")
    assert data.dataset.digest == DIGEST[:36]


@pytest.mark.fault_row(32)
@pytest.mark.parametrize("fault", ["500", "lost response"])
def test_an_evaluation_arrives_once_although_calls_fail(
    run_dir: Path, server: MlflowServer, fault: str
) -> None:
    """The first call of each kind fails; with a lost response it was executed nevertheless."""
    server.open()
    sender = sender_for(run_dir, server.uri)
    sender.pump()
    failed = set[str]()

    def once(path: str, body: bytes) -> str:
        kind = f"{path} {b'metrics' in body}"
        is_new = kind not in failed
        failed.add(kind)
        return fault if is_new else ""

    server.fault = once
    _keep(run_dir, split="a")
    _keep(run_dir, split="b")
    until_delivered(lambda: deliver_evaluations(run_dir))
    server.fault = None
    assert _scores(server.database, run_dir) == ["a/mem_len_64", "b/mem_len_64"]


def test_an_unreachable_server_is_a_warning_and_the_next_command_delivers(
    run_dir: Path,
    server: MlflowServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = _keep(run_dir)
    log_evaluations([checkpoint])
    assert not caplog.text, "never tracked"
    server.open()
    write_steps(run_dir, range(1, 6))
    sender_for(run_dir, server.uri).finish("finished")
    server.close()
    monkeypatch.setattr(process, "EVALUATION_SECONDS", 0.2)
    _keep(run_dir, mem_len=0)
    with caplog.at_level(logging.WARNING):
        log_evaluations([checkpoint, checkpoint])
    assert f"txl track sync {run_dir}" in caplog.text
    assert _scores(server.database, run_dir) == ["valid/mem_len_64"]
    server.open()
    monkeypatch.setattr(process, "EVALUATION_SECONDS", 300)
    log_evaluations([checkpoint])
    assert _scores(server.database, run_dir) == ["valid/mem_len_0", "valid/mem_len_64"]
    assert status_of(server.database, run_id_of(run_dir)) == "FINISHED"


def test_the_sender_of_a_run_that_trains_sends_the_evaluations(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`log_evaluations` leaves them to it."""
    sender = sender_for(run_dir)
    sender.pump()
    checkpoint = _keep(run_dir)
    monkeypatch.setattr(process, "run_sender", lambda *_, **__: pytest.fail("a second sender"))
    with open_descriptor(run_dir / LOCK) as lock:
        assert try_lock(lock)
        log_evaluations([checkpoint])
    sender.pump()
    assert len(_children(run_dir.parent / "mlflow.db", run_dir)) == 1


@pytest.mark.slow
def test_scores_that_a_run_got_after_its_end_are_delivered(run_dir: Path) -> None:
    """As `txl eval --watch` writes them; the status of the run stays."""
    directory_identity(run_dir)  # creates the folder
    request_for().save(run_dir / "logs" / "tracking-request.json")
    write_steps(run_dir, range(1, 4))
    sender_for(run_dir).finish("preempted")
    database, run_id = run_dir.parent / "mlflow.db", run_id_of(run_dir)
    with MetricsJournal(run_dir / "metrics.jsonl") as journal:
        journal.write({"step": 3, "tokens": 30, "time": START + 9, "valid/loss": 2.5})
    send_metrics(run_dir)
    assert recorded_steps(database, run_id, "valid/loss") == [3]
    assert recorded_steps(database, run_id) == [1, 2, 3]
    assert tags_of(database, run_id)["txl.status"] == "preempted"


def test_the_directory_of_a_renamed_run_does_not_come_back(run_dir: Path) -> None:
    write_steps(run_dir, range(1, 4))
    sender = sender_for(run_dir)
    sender.pump()
    run_dir.rename(run_dir.parent / "renamed")
    with pytest.raises(UnavailableError):
        sender.finish("failed")
    assert not run_dir.exists()


@pytest.mark.parametrize("damage", ["not JSON", "[1]", "{}", '{"split": 5}', "[" * 10**5])
def test_a_damaged_result_does_not_stop_the_delivery_of_others(run_dir: Path, damage: str) -> None:
    """Nor do other files in the folder of the results."""
    sender = sender_for(run_dir)
    sender.pump()
    _keep(run_dir)
    (run_dir / "evaluations" / "valid-0.json").write_text(damage)
    (run_dir / "evaluations" / "step-00000005.json").write_text(json.dumps(_result()))
    (run_dir / "evaluations" / "valid-1.jsonl").write_text("{}")
    sender.pump()
    assert len(_children(run_dir.parent / "mlflow.db", run_dir)) == 1
    assert len(state_of(run_dir).evaluations) == 2, "it is not tried again"


def test_a_repeated_evaluation_is_one_run(run_dir: Path) -> None:
    """Also if the sender was killed after the server had it, so that its state does not say so."""
    sender_for(run_dir).pump()
    before = (run_dir / "tracking.json").read_bytes()
    _keep(run_dir)
    sender_for(run_dir).pump()
    for state in ((run_dir / "tracking.json").read_bytes(), before):
        (run_dir / "tracking.json").write_bytes(state)
        os.utime(run_dir / "evaluations" / f"valid-{64:016x}.json", (1, 1))
        _keep(run_dir, workers=2)
        sender_for(run_dir).pump()
    database = run_dir.parent / "mlflow.db"
    (child,) = _children(database, run_dir)
    assert recorded_steps(database, child, "valid/mem_len_64/nats") == [5]
    assert status_of(database, child) == "FINISHED"


def test_after_a_full_disk_an_evaluation_is_there_once(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = sender_for(run_dir)
    sender.pump()
    _keep(run_dir)

    def full(*_: Any) -> Any:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(TrackingState, "save", full)
        for _ in range(2):
            with pytest.raises(UnavailableError, match="no space left"):
                sender.pump()
    sender.pump()
    assert len(_children(run_dir.parent / "mlflow.db", run_dir)) == 1


@pytest.mark.parametrize("folder", [".", "elsewhere"])
def test_the_run_of_a_copy_gets_all_evaluations_and_that_of_the_original_none_of_the_copy(
    run_dir: Path, template: Path, folder: str
) -> None:
    sender = sender_for(run_dir)
    sender.pump()
    _keep(run_dir, split="a")
    sender.pump()
    copy = run_dir.parent / folder / "copy"
    copy.parent.mkdir(exist_ok=True)
    if folder != ".":
        shutil.copy(template, copy.parent / "mlflow.db")
    shutil.copytree(run_dir, copy)
    _keep(copy, split="b")
    with pytest.raises(UnavailableError, match="copy"):
        deliver_evaluations(copy)
    sender_for(copy).pump()
    assert run_id_of(run_dir) != run_id_of(copy)
    assert _scores(run_dir.parent / "mlflow.db", run_dir) == ["a/mem_len_64"]
    assert _scores(copy.parent / "mlflow.db", copy) == ["a/mem_len_64", "b/mem_len_64"]
    before = run_ids(copy.parent / "mlflow.db")
    deliver_evaluations(copy)
    sender_for(copy).pump()
    assert run_ids(copy.parent / "mlflow.db") == before, "nothing is sent twice"


def test_a_run_that_was_moved_away_from_its_database_delivers_all_evaluations_again(
    run_dir: Path, template: Path
) -> None:
    """The default server depends on the folder. The first one is a run of the old database."""
    sender_for(run_dir).pump()
    _keep(run_dir, split="a")
    deliver_evaluations(run_dir)
    moved = run_dir.parent / "moved" / run_dir.name
    moved.parent.mkdir()
    run_dir.rename(moved)
    _keep(moved, split="b")
    shutil.copy(template, moved.parent / "mlflow.db")
    sender_for(moved).finish("finished")
    assert _scores(moved.parent / "mlflow.db", moved) == ["a/mem_len_64", "b/mem_len_64"]


def test_the_run_that_replaces_a_deleted_one_gets_its_evaluations(run_dir: Path) -> None:
    sender = sender_for(run_dir)
    sender.pump()
    _keep(run_dir)
    sender.pump()
    client_of(run_dir).delete_run(run_id_of(run_dir))
    write_steps(run_dir, range(1, 3))
    sender.pump()
    assert _scores(run_dir.parent / "mlflow.db", run_dir) == ["valid/mem_len_64"]


def have_checkpoints(monkeypatch: pytest.MonkeyPatch, save_ids: dict[int, str]) -> None:
    """Checkpoints by step, also superseded ones by their negative step."""

    def manifest_of(checkpoint: Path) -> Any:
        *is_superseded, step = checkpoint.name.replace("superseded", "").split("step-")
        number = -int(step) if is_superseded != [""] else int(step)
        if number not in save_ids:
            raise CheckpointError("it was removed")
        return SimpleNamespace(save_id=save_ids[number])

    monkeypatch.setattr(evaluations, "load_checkpoint_manifest", manifest_of)


def _names(run_dir: Path) -> set[str]:
    database = run_dir.parent / "mlflow.db"
    names = {tags_of(database, run)["mlflow.runName"] for run in _children(database, run_dir)}
    return {name for name in names if "superseded" not in name}


def test_a_score_of_a_superseded_checkpoint_never_belongs_to_a_later_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after a second resume, for a copy, or if the run on the server is deleted."""
    save_ids = {4: "4" * 32, 8: "8" * 32}
    have_checkpoints(monkeypatch, save_ids)
    write_steps(run_dir, range(1, 9))
    _keep(run_dir, mem_len=1, checkpoint="run/checkpoints/step-00000008", save_id="8" * 32)
    sender_for(run_dir).pump()
    assert _names(run_dir) == {"eval step 8: valid, mem_len 1"}
    # It was not delivered before the resume.
    _keep(run_dir, mem_len=2, checkpoint="run/checkpoints/step-00000008", save_id="8" * 32)
    save_ids[-8] = save_ids.pop(8)
    (run_dir / "checkpoints" / "superseded-step-00000008").mkdir(parents=True)
    with MetricsJournal(run_dir / "metrics.jsonl") as journal:
        journal.truncate_after(4)
    write_steps(run_dir, range(5, 21), since=START + 1000)
    _keep(run_dir, mem_len=3, checkpoint="run/checkpoints/step-00000016", save_id="6" * 32)
    save_ids[16] = "6" * 32
    sender_for(run_dir).pump()
    assert _names(run_dir) == {"eval step 16: valid, mem_len 3"}

    with MetricsJournal(run_dir / "metrics.jsonl") as journal:
        journal.truncate_after(16)
    sender_for(run_dir).pump()
    assert _names(run_dir) == {"eval step 16: valid, mem_len 3"}
    copy = run_dir.parent / "copy"
    shutil.copytree(run_dir, copy)
    sender_for(copy).pump()
    assert _names(copy) == {"eval step 16: valid, mem_len 3"}
    client_of(run_dir).delete_run(run_id_of(run_dir))
    sender_for(run_dir).pump()
    assert _names(run_dir) == {"eval step 16: valid, mem_len 3"}
    # The resumed run has the same weights at step 8, so their score has the same name.
    _keep(run_dir, mem_len=1, checkpoint="run/checkpoints/step-00000008", save_id="9" * 32)
    sender_for(run_dir).pump()
    assert _names(run_dir) == {"eval step 16: valid, mem_len 3", "eval step 8: valid, mem_len 1"}


@pytest.mark.parametrize("save_id", ["8" * 32, None])
def test_a_score_of_the_resumed_run_is_delivered_although_its_checkpoint_was_removed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, save_id: str | None
) -> None:
    """The server did not respond meanwhile. `save_id` None: the result of an earlier version."""
    have_checkpoints(monkeypatch, {})
    write_steps(run_dir, range(1, 9))
    name = "run/checkpoints/step-00000008"
    _keep(run_dir, mem_len=1, checkpoint=name, save_id=save_id)
    sender_for(run_dir).pump()
    with MetricsJournal(run_dir / "metrics.jsonl") as journal:
        journal.truncate_after(4)
    write_steps(run_dir, range(5, 21), since=START + 1000)
    _keep(run_dir, mem_len=2, checkpoint=name, save_id="9" * 32)
    for _ in range(2):
        sender_for(run_dir).pump()
    assert _names(run_dir) == {"eval step 8: valid, mem_len 2"}


def test_a_superseded_checkpoint_between_two_lines_of_the_journal_is_known_by_its_save(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_ids = {15: "5" * 32, 18: "8" * 32}
    have_checkpoints(monkeypatch, save_ids)
    for step, since in ((10, START), (20, START)):
        write_steps(run_dir, range(step, step + 1), since=since)
    _keep(run_dir, mem_len=1, checkpoint="run/checkpoints/step-00000018", save_id="8" * 32)
    _keep(run_dir, mem_len=2, checkpoint="run/checkpoints/step-00000015", save_id="5" * 32)
    sender_for(run_dir).pump()
    save_ids[-18] = save_ids.pop(18)
    (run_dir / "checkpoints" / "superseded-step-00000018").mkdir(parents=True)
    with MetricsJournal(run_dir / "metrics.jsonl") as journal:
        journal.truncate_after(15)
    write_steps(run_dir, range(20, 21), since=START + 1000)
    sender_for(run_dir).pump()
    assert _names(run_dir) == {"eval step 15: valid, mem_len 2"}


def test_a_run_that_supersedes_another_gets_the_evaluations_of_the_checkpoints_that_are_left(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of removed checkpoints, as the oldest are, only those before the superseded steps."""
    saved = {4: "1" * 32, 5: "2" * 32, 7: "3" * 32}

    have_checkpoints(monkeypatch, saved)
    write_steps(run_dir, range(1, 9))
    sender = sender_for(run_dir)
    for number, (step, save_id) in enumerate(
        [(1, "0" * 32), (4, "1" * 32), (5, "9" * 32), (7, "3" * 32), (8, "8" * 32)]
    ):
        name = f"run/checkpoints/step-{step:08d}"
        _keep(run_dir, mem_len=number, checkpoint=name, save_id=save_id)
    (run_dir / "evaluations" / "valid-0.json").write_text("damaged")
    sender.pump()
    superseded = run_id_of(run_dir)
    with MetricsJournal(run_dir / "metrics.jsonl") as journal:
        journal.truncate_after(5)
    for _ in range(2):
        sender_for(run_dir).pump()

    database = run_dir.parent / "mlflow.db"
    assert run_id_of(run_dir) != superseded
    runs = {tags_of(database, run)["mlflow.runName"] for run in _children(database, run_dir)}
    assert runs - {"run (superseded)"} == {
        "eval step 1: valid, mem_len 0",  # removed since
        "eval step 4: valid, mem_len 1",
        # Step 5 was saved again since. Step 7 is of the resumed training, which the server missed.
        "eval step 7: valid, mem_len 3",
    }
