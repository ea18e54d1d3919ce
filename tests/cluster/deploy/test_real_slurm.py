"""cluster/deploy/slurm.sh under a real Slurm with two nodes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.deploy.test_slurm import ROOT, SCRIPT
from tests.support.commands import num_lines, wait_until
from tests.support.gloo_ranks import RankGroups
from tests.support.slurm import Slurm, slurm_cluster
from tests.support.training_runs import NO_EVALUATION, TINY, losses, tiny_spec, train

pytestmark = pytest.mark.cluster
ONE_RANK_PER_NODE = ("--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with slurm_cluster() as cluster:
        yield cluster


def test_a_signalled_job_saves_is_requeued_and_ends_as_an_undisturbed_one(
    slurm: Slurm, ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    straight, run, output = (tmp_path / name for name in ("straight", "run", "out"))
    settings = (NO_EVALUATION, "training.num_steps=300", "training.checkpoint_interval_steps=1000")
    assert ranks(2).run(train, tiny_spec(dataset, straight, *settings)) == [0, 0]

    words = (f"data.path={dataset}", f"directory={run}", *settings)
    # From the root of the repository, as its README says.
    where = (f"--chdir={ROOT}", f"--output={output}")
    job_id = slurm.submit(*ONE_RANK_PER_NODE, *where, SCRIPT, TINY, *words)
    wait_until(lambda: num_lines(run / "metrics.jsonl") > 10)
    slurm.call("scancel", "--signal=USR1", job_id)  # as before the time limit
    wait_until(lambda: slurm.job(job_id)["Restarts"] == "1", timeout_seconds=60, poll_seconds=1)
    saved = [int(path.name[-8:]) for path in (run / "checkpoints").glob("step-*")]
    assert len(saved) == 1
    assert 10 < saved[0] < 300  # only the stop request saved

    wait_until(lambda: slurm.job(job_id)["JobState"] in ENDED, timeout_seconds=120, poll_seconds=1)
    job, text = slurm.job(job_id), output.read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), text
    assert f"resuming at step {saved[0]} " in text
    assert losses(run) == losses(straight)
