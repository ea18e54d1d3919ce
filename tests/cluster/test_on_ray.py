"""Ray, for real: training under Ray Train, evaluation with actors, and a killed rank."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest

from cluster.evaluation import score_on_ray
from cluster.own_ray import own_token, processes_with
from cluster.preparation import RayWorkers
from cluster.session import ray_session
from cluster.training import train_on_ray
from data_pipeline.errors import DataError, UnfinishedError
from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.shard_reader import open_split
from tests.support.commands import num_lines, start_txl, txl, wait_until
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, TINY, losses, tiny_job, train
from txl_dist.evaluation.evaluate import (
    EvaluationJob,
    EvaluationSettings,
    evaluate_here,
    plan_evaluation,
    summarise,
)

NUM_STEPS = 400
LONG = (NO_EVALUATION, f"training.num_steps={NUM_STEPS}", "training.checkpoint_interval_steps=50")


@pytest.fixture(scope="module")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained by two ranks under Ray Train."""
    run = tmp_path_factory.mktemp("ray") / "run"
    lines: list[str] = []
    train_on_ray(tiny_job(dataset, run), num_ranks=2, address=None, on_line=lines.append)
    assert any("step 20 | loss" in line for line in lines)
    assert any("2 ranks on cpu" in line for line in lines)
    return run


def test_a_run_on_ray_has_the_losses_of_plain_processes(
    ranks: RankGroups, dataset: Path, trained: Path, tmp_path: Path
) -> None:
    assert ranks(2).run(train, tiny_job(dataset, tmp_path)) == [0, 0]
    assert losses(trained) == losses(tmp_path)


@pytest.mark.slow
def test_the_score_is_the_same_for_any_number_of_workers_and_any_batch(
    dataset: Path, trained: Path
) -> None:
    settings = EvaluationSettings(
        split="valid",
        mode="exact",
        tgt_len=6,
        mem_len=8,
        clamp_len=None,
        same_length=False,
        reset="document",
    )
    job = EvaluationJob(
        checkpoint=trained / "checkpoints" / "step-00000020",
        data=dataset,
        settings=settings,
        batch_chunks=3,
    )
    expected = evaluate_here(job, on_progress=lambda done, total: None)
    assert expected.sums.num_tokens == load_manifest(dataset).splits["valid"].tokens - 1
    pieces = plan_evaluation(open_split(dataset, "valid"), settings, n_layer=2)
    assert len(pieces) > 12  # so that three workers all have something to do
    with ray_session(None, num_cpus=3):
        assert_nobody_else_can_use_this_ray()
        for num_workers, batch_chunks in ((1, 5), (2, 1), (3, 4)):
            scores = score_on_ray(
                replace(job, batch_chunks=batch_chunks),
                pieces,
                num_workers=num_workers,
                num_threads=1,
                on_progress=lambda done, total: None,
            )
            found = summarise(scores, pieces, settings)
            assert found.sums.num_tokens == expected.sums.num_tokens
            assert found.sums.nats == pytest.approx(expected.sums.nats, rel=1e-6)


def assert_nobody_else_can_use_this_ray() -> None:
    """All of it listens on 127.0.0.1 only, and answers nobody without the token."""
    import ray

    own = psutil.Process()
    addresses = {
        connection.laddr.ip
        for process in (own, *processes_with(own_token()))
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1", "::ffff:127.0.0.1"}
    context = ray.get_runtime_context()
    for path in ("api/version", "api/jobs/", "nodes?view=summary"):
        with pytest.raises(HTTPError, match="401"):
            urlopen(f"http://{ray._private.worker.get_dashboard_url()}/{path}")
    ask = f"from ray._raylet import GcsClient; GcsClient(address='{context.gcs_address}')"
    environment = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
    asked = subprocess.run(
        [sys.executable, "-c", ask],
        check=False,
        capture_output=True,
        text=True,
        env={**environment, "HOME": "/nonexistent"},
    )
    assert asked.returncode == 1
    assert "AuthenticationError" in asked.stderr


@pytest.mark.slow
def test_a_dataset_prepared_and_verified_on_ray_has_the_same_bytes(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "data_pipeline"
    options = ("--shuffle", 1, "--split", "valid=0.2", "--format", "text", "--json")
    found = []
    for name, where in (("here", ()), ("ray", ("--on", "ray", "--workers", 2))):
        out = tmp_path / name
        ended = txl("prepare", folder, "--out", out, *options, *where)
        assert ended.returncode == 0, ended.stderr
        found.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert found[0] == found[1]
    (tmp_path / "ray" / "valid-000000.tar.zst").unlink()
    ended = txl("data", "verify", tmp_path / "ray", "--on", "ray", "--workers", 2)
    assert ended.returncode == 3, ended.stderr
    assert "valid-000000.tar.zst: missing" in ended.stderr


def die_at_first(path: Path) -> str:
    """Kills its worker where nobody did before."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return path.name
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def die(path: Path) -> None:
    if path.name == "b":
        os._exit(9)


def refuse(path: Path) -> None:
    raise DataError(f"{path.name} is bad")


@pytest.mark.slow
def test_workers_on_ray_keep_the_contract_of_workers(tmp_path: Path) -> None:
    units = [tmp_path / name for name in "abcde"]
    with RayWorkers(2, address=None) as workers:
        assert sorted(workers.map(die_at_first, units)) == list(enumerate("abcde"))
        assert workers.peak_memory_bytes > 2**20
        with pytest.raises(UnfinishedError, match=r"the worker for .*/b died"):
            list(workers.map(die, units))
        with pytest.raises(DataError, match=r"^[a-e] is bad$"):
            list(workers.map(refuse, units))


@pytest.mark.fault
def test_a_killed_rank_is_restarted_and_the_losses_do_not_notice(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert ranks(2).run(train, tiny_job(dataset, straight, *LONG)) == [0, 0]
    given = (f"data.path={dataset}", f"directory={run}", *LONG)
    process = start_txl("train", TINY, *given, "--ranks", 2)
    wait_until(lambda: num_lines(run / "metrics.jsonl") > 80, timeout_seconds=120)
    (victim, *_) = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "TrainWorker" in " ".join(child.cmdline())
    ]
    os.kill(victim.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert "resuming at step" in output
    assert re.search(r"rank [01] \(node 127\.0\.0\.1, pid \d+\).* died; waiting for ", output)
    assert "Traceback" not in output
    assert losses(run) == losses(straight)


@pytest.mark.fault
def test_sigterm_to_every_process_saves_and_exits_75_and_leaves_no_process(
    dataset: Path, tmp_path: Path
) -> None:
    """Kubernetes, Slurm and systemd signal the whole job: launcher, Ray and ranks."""
    given = (f"data.path={dataset}", f"directory={tmp_path}", *LONG)
    process = start_txl("train", TINY, *given, "--ranks", 2)
    wait_until(lambda: num_lines(tmp_path / "metrics.jsonl") > 20, timeout_seconds=120)
    children = psutil.Process(process.pid).children(recursive=True)
    for pid in (process.pid, *(child.pid for child in children)):
        os.kill(pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "stopping after this step, then saving" in output
    assert "SIGTERM received" not in output
    stopped_at = max(losses(tmp_path))
    assert (tmp_path / "checkpoints" / f"step-{stopped_at:08d}" / "manifest.json").exists()
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive
