"""FAULTS 7: the error names a rank that hangs, and the collective that waits for it."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.commands import children_of, num_lines, start_txl, wait_until
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, TINY, ZERO, tiny_job
from txl_dist.errors import LostRankError
from txl_dist.runtime.world import World
from txl_dist.training.job import TrainJob
from txl_dist.training.rank import train_rank
from txl_dist.training.step import TrainStep

pytestmark = pytest.mark.fault

LIMIT_SECONDS = 4


@pytest.mark.fault_row(7)
def test_a_stopped_rank_is_named_with_the_collective(dataset: Path, tmp_path: Path) -> None:
    process = start_txl(
        "train", TINY, f"data.path={dataset}", f"directory={tmp_path}", NO_EVALUATION,
        "tracking.enabled=false", "training.num_steps=100000",
        f"training.rank_timeout_seconds={LIMIT_SECONDS}", "--on", "processes", "--ranks", 2,
    )  # fmt: skip
    wait_until(lambda: num_lines(tmp_path / "metrics.jsonl") > 5)
    os.kill(children_of(process.pid)[1], signal.SIGSTOP)
    began = time.monotonic()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert time.monotonic() - began < LIMIT_SECONDS + 30
    assert "rank 1 hung and was killed" in output
    assert f"rank 0 waited training.rank_timeout_seconds={LIMIT_SECONDS}" in output
    assert "for the other ranks in " in output
    assert "There is no checkpoint in" in output


def stall_in_backward(world: World, job: TrainJob) -> str | None:
    """Rank 1 does not join the reduction of step 3; returns the error of this rank."""
    original = TrainStep._micro_batch

    def stalling(self: TrainStep, *args: object, **options: object) -> object:
        if world.rank == 1 and options["step"] == 3:
            wait_until((job.run_path / "noticed").exists)
        return original(self, *args, **options)  # type: ignore[arg-type]

    TrainStep._micro_batch = stalling  # type: ignore[assignment,method-assign]
    try:
        train_rank(job, world)
    except LostRankError as error:
        (job.run_path / "noticed").touch()
        return str(error)
    finally:
        TrainStep._micro_batch = original  # type: ignore[method-assign]
    return None


@pytest.mark.fault_row(7)
@pytest.mark.parametrize("stage", ZERO)
def test_the_limit_reaches_the_gradients_at_every_stage(
    ranks: RankGroups, dataset: Path, tmp_path: Path, stage: str
) -> None:
    limit = f"training.rank_timeout_seconds={LIMIT_SECONDS}"
    job = tiny_job(dataset, tmp_path, NO_EVALUATION, *ZERO[stage], limit)
    group = ranks(2)
    message, _ = group.run(stall_in_backward, job)
    group.is_broken = True
    assert message is not None
    assert message.startswith(f"rank 0 waited {limit} for the other ranks in ")
    assert "(step 3)" in message
