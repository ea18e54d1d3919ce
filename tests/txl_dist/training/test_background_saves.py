"""Checkpoints are written in the background; an error in one rank's thread reaches all ranks."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, ZERO, losses, tiny_job, train
from tests.txl_dist.training.test_saving import train_changed, unchanged
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.reader import verify_checkpoint
from txl_dist.checkpoint.snapshot import Snapshot
from txl_dist.checkpoint.writer import Save
from txl_dist.errors import DataError
from txl_dist.runtime.world import World
from txl_dist.training.job import TrainJob
from txl_dist.training.loop import Trainer

SETTINGS = (NO_EVALUATION, "training.checkpoint_interval_steps=5", "training.keep_checkpoints=9")


def train_with_slow_disk(world: World, job: TrainJob, rank: int) -> tuple[int, str]:
    """A save of `rank` takes until 3 more steps have been trained, except at the end."""
    write_part = Save.write_part
    trainers: list[Trainer] = []

    def write_late(save: Save, snapshot: Snapshot) -> None:
        deadline = time.monotonic() + 60
        while save.rank == rank and trainers[0].state.step < min(20, save.step + 3):
            assert time.monotonic() < deadline, "the loop waits for the save"
            time.sleep(0.001)
        write_part(save, snapshot)

    Save.write_part = write_late  # type: ignore[method-assign]
    try:
        return train_changed(world, job, trainers.append)
    finally:
        Save.write_part = write_part  # type: ignore[method-assign]


@pytest.mark.parametrize("stage", ["1", pytest.param("3-all-spread", marks=pytest.mark.slow)])
def test_steps_go_on_while_a_checkpoint_is_written_and_it_holds_the_state_of_its_step(
    ranks: RankGroups, dataset: Path, tmp_path: Path, stage: str
) -> None:
    straight = tiny_job(dataset, tmp_path / "straight", *SETTINGS, *ZERO[stage])
    assert ranks(2).run(train, straight) == [0, 0]
    slow = tiny_job(dataset, tmp_path / "slow", *SETTINGS, *ZERO[stage])
    assert ranks(2).run(train_with_slow_disk, slow, 1) == [(0, "")] * 2
    assert losses(slow.run_path) == losses(straight.run_path)
    for step in (5, 10, 15, 20):
        expected, actual = (
            verify_checkpoint(CheckpointDirectory(job.run_path).at(step)).files
            for job in (straight, slow)
        )
        assert actual == expected, "the same bytes"


def fail_on_rank(trainer: Trainer, rank: int, step: int) -> None:
    """The disk of one rank is full at the save of a step."""
    saver: Any = trainer.saver
    write = saver._write

    def failing(save: Save, snapshot: Any, *rest: Any) -> None:
        if save.rank == rank and save.step == step:

            def full(_: Path) -> Any:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            save.directory.begin = full  # type: ignore[method-assign, assignment]
        write(save, snapshot, *rest)

    saver._write = failing


@pytest.mark.slow
@pytest.mark.parametrize("step", [10, 20])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_rank_ends_all_ranks_at_the_same_step(
    ranks: RankGroups, dataset: Path, tmp_path: Path, rank: int, step: int
) -> None:
    ends = ranks(2).run(
        train_changed, tiny_job(dataset, tmp_path, *SETTINGS), fail_on_rank, rank, step
    )
    for code, message in ends:
        assert code == 4
        assert f"rank {rank}: OSError: [Errno 28] No space left on device" in message
        assert f"resumes from the newest checkpoint, that of step {step - 5}" in message
    directory = CheckpointDirectory(tmp_path)
    assert directory.steps() == list(range(5, step, 5))
    assert not list(directory.path.glob(".*"))


def end_after(trainer: Trainer, step: int) -> None:
    """Both ranks end with an error directly after the save of a step."""
    segments = trainer.segments

    def failing() -> Any:
        while trainer.state.step < step:
            yield next(segments)
        raise DataError("a shard is gone")

    trainer.segments = failing()


@pytest.mark.slow
def test_an_error_of_the_run_does_not_lose_the_save_in_flight(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    job = tiny_job(dataset, tmp_path, *SETTINGS)
    ends = ranks(2).run(train_changed, job, end_after, 10)
    assert [code for code, _ in ends] == [3, 3]
    assert CheckpointDirectory(tmp_path).steps() == [5, 10]
    verify_checkpoint(CheckpointDirectory(tmp_path).at(10))


@pytest.mark.slow
def test_a_checkpoint_is_saved_when_minutes_have_passed_on_rank_0(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    settings = (*SETTINGS, "training.checkpoint_interval_steps=99", "training.num_steps=6")
    minutes = "training.checkpoint_interval_minutes=1e-6"
    job = tiny_job(dataset, tmp_path, *settings, minutes)
    assert ranks(2).run(train_changed, job, unchanged) == [(0, "")] * 2
    assert CheckpointDirectory(tmp_path).steps() == [1, 2, 3, 4, 5, 6]
