"""cluster/deploy/slurm.sh under a real Slurm with two nodes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.deploy.test_slurm import ROOT, SCRIPT
from tests.support.commands import num_lines, wait_until
from tests.support.gloo_ranks import RankGroups
from tests.support.slurm import Slurm, slurm_cluster
from tests.support.training_runs import NO_EVALUATION, TINY, losses, tiny_job, train

pytestmark = pytest.mark.cluster
ONE_RANK_PER_NODE = ("--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with slurm_cluster() as cluster:
        yield cluster


def submit(slurm: Slurm, output: Path, *words: object, options: tuple[str, ...] = ()) -> str:
    """Submit the script from the root of the repository, as its README says."""
    where = (f"--chdir={ROOT}", f"--output={output}")
    return slurm.submit(*ONE_RANK_PER_NODE, *where, *options, SCRIPT, *words)


def wait_for(slurm: Slurm, job_id: str, states: set[str], *, timeout_seconds: float) -> None:
    wait_until(
        lambda: slurm.job(job_id)["JobState"] in states,
        timeout_seconds=timeout_seconds,
        poll_seconds=1.0,
    )


def test_an_invalid_config_fails_the_job_with_2_and_is_not_requeued(
    slurm: Slurm, tmp_path: Path
) -> None:
    job_id = submit(slurm, tmp_path / "out", tmp_path / "missing.yaml")
    wait_for(slurm, job_id, ENDED, timeout_seconds=90)
    job = slurm.job(job_id)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "0")
    assert "missing.yaml" in (tmp_path / "out").read_text()


@pytest.mark.parametrize("signal", ["USR1", "TERM"])
def test_a_signalled_job_saves_is_requeued_and_ends_as_an_undisturbed_one(
    slurm: Slurm, ranks: RankGroups, dataset: Path, tmp_path: Path, signal: str
) -> None:
    straight, run, output = (tmp_path / name for name in ("straight", "run", "out"))
    settings = (NO_EVALUATION, "training.num_steps=300", "training.checkpoint_interval_steps=1000")
    assert ranks(2).run(train, tiny_job(dataset, straight, *settings)) == [0, 0]

    words = (f"data.path={dataset}", f"directory={run}", *settings)
    job_id = submit(slurm, output, TINY, *words)
    wait_until(lambda: num_lines(run / "metrics.jsonl") > 10)
    slurm.call("scancel", f"--signal={signal}", job_id)
    wait_until(lambda: slurm.job(job_id)["Restarts"] == "1", timeout_seconds=60, poll_seconds=1)
    saved = [int(path.name[-8:]) for path in (run / "checkpoints").glob("step-*")]
    assert len(saved) == 1
    assert 10 < saved[0] < 300  # only the stop request saved

    wait_for(slurm, job_id, ENDED, timeout_seconds=120)
    job, text = slurm.job(job_id), output.read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), text
    assert f"resuming at step {saved[0]} " in text
    assert losses(run) == losses(straight)


def test_before_the_time_limit_the_job_saves_and_continues_after_its_requeue(
    slurm: Slurm, dataset: Path, tmp_path: Path
) -> None:
    """Slurm checks time limits every 30 seconds, and may signal 60 seconds early."""
    run, output = tmp_path / "run", tmp_path / "out"
    words = (f"data.path={dataset}", f"directory={run}", NO_EVALUATION, "training.num_steps=99999")
    words = (*words, "training.checkpoint_interval_steps=99999", "training.log_interval_steps=50")
    job_id = submit(slurm, output, TINY, *words, options=("--time=2", "--signal=USR1@60"))
    wait_until(lambda: slurm.job(job_id)["Restarts"] == "1", timeout_seconds=150, poll_seconds=1)
    checkpoints = list((run / "checkpoints").glob("step-*/manifest.json"))
    assert len(checkpoints) == 1, output.read_text()
    step = int(checkpoints[0].parent.name[-8:])
    wait_until(lambda: f"resuming at step {step} " in output.read_text(), timeout_seconds=60)
    lines = num_lines(run / "metrics.jsonl")
    wait_until(lambda: num_lines(run / "metrics.jsonl") > lines, timeout_seconds=60)
    slurm.call("scancel", job_id)
    wait_for(slurm, job_id, {"CANCELLED"}, timeout_seconds=60)
