"""MLflow: the data of a run are its inputs, and its checkpoints its models, each once."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
from mlflow.entities import LoggedModel
from mlflow.tracking import MlflowClient

from tests.support.checkpoint_manifests import point_to, write_manifest
from tests.support.commands import txl, wait_until
from tests.support.training_runs import TINY
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.tracking.journal import MetricsJournal
from txl_dist.tracking.sender import Sender
from txl_dist.tracking.tracker import UnavailableError, child_environment

from .conftest import (
    START,
    MlflowServer,
    recorded_steps,
    request_for,
    run_id_of,
    run_ids,
    sender_for,
    tags_of,
    write_steps,
)

DIGEST = "0123456789abcdef" * 4
DATASETS = [
    {
        **{"name": "books/train", "digest": DIGEST, "source": "/data/books"},
        **{"context": "training", "profile": {"tokens": 900, "documents": 9, "dtype": "uint16"}},
    },
    {
        **{"name": "books/valid", "digest": DIGEST, "source": "/data/books"},
        **{"context": "evaluation", "profile": {"tokens": 100}, "scores": "valid/"},
    },
]
HOW_TO = Path(__file__).parents[3] / "docs" / "how_to" / "track_with_mlflow.md"


def _uri(run_dir: Path) -> str:
    return f"sqlite:///{run_dir.parent / 'mlflow.db'}"


def _models(uri: str, experiment: str = "tests") -> list[LoggedModel]:
    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    models = client.search_logged_models([found.experiment_id], max_results=100)
    return sorted(models, key=lambda model: int(model.params["step"]))


def _train_to(run_dir: Path, step: int, loss: float, *, since: float = START) -> None:
    """Five steps, a score and a checkpoint."""
    write_steps(run_dir, range(step - 4, step + 1), since=since)
    with MetricsJournal(run_dir / "metrics.jsonl") as journal:
        journal.write({"step": step, "tokens": 1, "time": since + step + 0.5, "valid/loss": loss})
    write_manifest(run_dir, step)
    point_to(run_dir, "LATEST", step)


def _deliver(sender: Sender) -> None:
    """Call until everything is delivered."""
    for _ in range(300):
        try:
            sender.pump()
            sender.set_end_status("finished")
            sender.finish()
            return
        except UnavailableError:
            continue
    pytest.fail("never delivered")


def test_the_data_of_a_run_are_inputs_with_their_context_and_sizes(run_dir: Path) -> None:
    for _ in range(2):  # a resume records nothing twice
        sender_for(run_dir, datasets=DATASETS).pump()
    inputs = MlflowClient(_uri(run_dir)).get_run(run_id_of(run_dir)).inputs.dataset_inputs
    found = {
        (i.dataset.name, i.dataset.digest, i.tags[0].value): json.loads(i.dataset.profile or "")
        for i in inputs
    }
    assert len(inputs) == 2
    training = found["books/train", DIGEST[:36], "training"]
    assert training == {"tokens": 900, "documents": 9, "dtype": "uint16", "sha256": DIGEST}
    assert found["books/valid", DIGEST[:36], "evaluation"]["tokens"] == 100
    first = next(i.dataset for i in inputs if i.dataset.name == "books/train")
    assert mlflow.data.get_source(first).uri == "/data/books"


def test_the_models_of_a_run_are_the_checkpoints_that_exist(run_dir: Path) -> None:
    sender = sender_for(run_dir, datasets=DATASETS)
    for step, loss in ((5, 2.0), (10, 1.5), (15, 1.7)):
        _train_to(run_dir, step, loss)
        sender.pump()
    point_to(run_dir, "BEST", 10)
    shutil.rmtree(write_manifest(run_dir, 5))
    _deliver(sender)

    tenth, newest = _models(_uri(run_dir))
    assert (tenth.params["step"], tenth.params["model.mem_len"], tenth.status) == (
        *("10", "64"),
        "READY",
    )
    assert tenth.tags["txl.path"] == str(CheckpointDirectory(run_dir).at(10))
    assert tenth.tags["txl.manifest_sha256"] == f"{10:064x}"
    assert (tenth.tags["txl.best"], tenth.tags["txl.latest"]) == ("true", "false")
    assert (newest.tags["txl.best"], newest.tags["txl.latest"]) == ("false", "true")
    (score,) = tenth.metrics or ()
    assert (score.key, score.value, score.step) == ("valid/loss", 1.5, 10)
    assert (score.dataset_name, score.dataset_digest) == ("books/valid", DIGEST[:36])
    assert recorded_steps(run_dir.parent / "mlflow.db", run_id_of(run_dir), "valid/loss") == [
        *(5, 10, 15)
    ]


def test_the_how_to_finds_the_best_checkpoint_with_one_query(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, loss in ((5, 2.0), (10, 1.5), (15, 1.7)):
        _train_to(run_dir, step, loss)
    _deliver(sender_for(run_dir, datasets=DATASETS, experiment="books"))
    (code,) = re.findall(r"```python\n(.*?)```", HOW_TO.read_text(), re.DOTALL)
    monkeypatch.chdir(run_dir.parent)
    (run_dir.parent / "runs").mkdir()
    (run_dir.parent / "runs/mlflow.db").symlink_to(run_dir.parent / "mlflow.db")
    values: dict[str, object] = {}
    exec(compile(code, HOW_TO, "exec"), values)
    assert values["path"] == str(CheckpointDirectory(run_dir).at(10))


@pytest.mark.fault_row(32)
@pytest.mark.parametrize("fault", ["lost response", pytest.param("500", marks=pytest.mark.slow)])
def test_each_checkpoint_is_one_model_although_calls_fail(
    run_dir: Path, server: MlflowServer, fault: str
) -> None:
    """The first call of each kind fails, then a third; with a lost response it was executed."""
    generator, failed, experiment = random.Random(0), set[str](), f"models with {fault}"

    def often(path: str, body: bytes) -> str:
        if path not in failed or generator.random() < 1 / 3:
            failed.add(path)
            return fault
        return ""

    server.open()
    server.fault = often
    for step, loss in ((5, 2.0), (10, 1.5)):
        _train_to(run_dir, step, loss)
        _deliver(sender_for(run_dir, server.uri, datasets=DATASETS, experiment=experiment))
    server.fault = None
    assert any(path.endswith("/logged-models") for path in failed)
    models = _models(server.uri, experiment)
    assert [model.params["step"] for model in models] == ["5", "10"]
    assert [[m.value for m in model.metrics or ()] for model in models] == [[2.0], [1.5]]
    (run_id,) = run_ids(server.database, experiment)
    assert recorded_steps(server.database, run_id, "valid/loss") == [5, 10]
    outputs = MlflowClient(server.uri).get_run(run_id).outputs.model_outputs
    assert sorted(output.step for output in outputs) == [5, 10]


@pytest.mark.slow
@pytest.mark.fault_row(32)
def test_a_sender_killed_before_it_sees_the_response_creates_no_second_model(
    run_dir: Path, server: MlflowServer, tmp_path: Path
) -> None:
    executed = list[str]()

    def respond_never(path: str, body: bytes) -> str:
        if path.endswith("/logged-models") and b"source_run_id" in body:
            executed.append(path)
            return "lost response"  # of the sender's life: it is killed before the next call
        if executed:
            os.kill(process.pid, signal.SIGKILL)
        return ""

    server.open()
    server.fault = respond_never
    _train_to(run_dir, 5, 2.0)
    request_for(server.uri, datasets=DATASETS, experiment="killed").save(tmp_path / "request")
    command = [sys.executable, "-m", "txl_dist.tracking.sender", str(run_dir)]
    with subprocess.Popen(
        [*command, "--request", str(tmp_path / "request")],
        env=child_environment(),
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        wait_until(lambda: process.poll() is not None)
    assert process.returncode == -signal.SIGKILL
    assert executed
    server.fault = None
    _deliver(sender_for(run_dir, server.uri, datasets=DATASETS, experiment="killed"))
    (model,) = _models(server.uri, "killed")
    assert (model.status, [m.value for m in model.metrics or ()]) == ("READY", [2.0])


def test_a_server_without_models_gets_everything_else(run_dir: Path, server: MlflowServer) -> None:
    """As MLflow before version 3: 404, for ever."""
    server.open()
    server.fault = lambda path, body: "404" if "logged-models" in path else ""
    _train_to(run_dir, 5, 2.0)
    sender = sender_for(run_dir, server.uri, datasets=DATASETS, experiment="old")
    sender.pump()
    sender.set_end_status("finished")
    sender.finish()
    assert recorded_steps(server.database, run_id_of(run_dir), "valid/loss") == [5]


def test_after_a_rollback_the_models_belong_to_the_new_run(run_dir: Path) -> None:
    _train_to(run_dir, 5, 2.0)
    _train_to(run_dir, 10, 3.0)
    sender_for(run_dir, datasets=DATASETS).pump()
    first = run_id_of(run_dir)
    with MetricsJournal(run_dir / "metrics.jsonl") as journal:
        journal.truncate_after(5)
    shutil.rmtree(write_manifest(run_dir, 10))
    _train_to(run_dir, 10, 1.0, since=START + 1000)
    _deliver(sender_for(run_dir, datasets=DATASETS))

    models = _models(_uri(run_dir))
    assert {model.source_run_id for model in models} == {run_id_of(run_dir)}
    assert [[m.value for m in model.metrics or ()] for model in models] == [[2.0], [1.0]]
    assert tags_of(run_dir.parent / "mlflow.db", first)["mlflow.runName"] == "run (superseded)"


def test_a_checkpoint_directory_that_cannot_be_read_changes_no_model(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _train_to(run_dir, 5, 2.0)
    sender = sender_for(run_dir, datasets=DATASETS)
    sender.pump()

    def fail(_: CheckpointDirectory) -> list[int]:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointDirectory, "steps", fail)
        sender.pump()
    assert len(_models(_uri(run_dir))) == 1


@pytest.mark.slow
def test_a_real_run_has_its_data_its_checkpoints_and_its_best_one(
    dataset: Path, run_dir: Path
) -> None:
    run = run_dir.with_name("real")
    done = txl(
        *("train", TINY, f"data.path={dataset}", f"directory={run}", "--on", "processes"),
        "tracking={enabled: true, experiment: real, end_timeout_seconds: 200}",
        "evaluation.interval_steps=5",
        "training.checkpoint_interval_steps=5",
        "training.keep_checkpoints=2",
        timeout_seconds=400,
    )
    assert done.returncode == 0, done.stderr
    models = _models(_uri(run_dir), "real")
    assert [int(model.params["step"]) for model in models] == CheckpointDirectory(run).steps()
    assert all(
        {"valid/loss", "valid/perplexity"} <= {metric.key for metric in model.metrics or ()}
        for model in models
    )
    (best,) = [model for model in models if model.tags["txl.best"] == "true"]
    losses = [
        next(metric.value for metric in model.metrics or () if metric.key == "valid/loss")
        for model in models
    ]
    lowest = models[losses.index(min(losses))]
    pointer = CheckpointDirectory(run).pointer("BEST")
    assert int(best.params["step"]) == pointer == int(lowest.params["step"])
    contexts = MlflowClient(_uri(run_dir)).get_run(run_id_of(run)).inputs.dataset_inputs
    assert sorted(i.tags[0].value for i in contexts) == ["evaluation", "training"]
