"""RunSaver alone: two ranks as threads of one process, without an engine or steps.

`test_saving.py` has real ranks and steps.
"""

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.txl_dist.checkpoint.saving import HEADER, NUM_LANES, memory, model, whole
from txl_dist.checkpoint.checkpoints import Checkpoints, Save
from txl_dist.checkpoint.directory import CheckpointDirectory, Retention
from txl_dist.checkpoint.tensors import Snapshot, verify_checkpoint
from txl_dist.config.training_config import TrainingConfig
from txl_dist.errors import CheckpointError, DivergedError, LostRankError, TxlError
from txl_dist.runtime import world as world_module
from txl_dist.runtime.world import World
from txl_dist.training.saving import RunSaver
from txl_dist.training.scores import ScoreTable, StepScore
from txl_dist.training.state import TrainState


@dataclass
class Exchange:
    """All-gather of threads."""

    barrier: threading.Barrier
    values: list[Any] = field(default_factory=lambda: [None, None])


class ThreadWorld(World):
    """A rank that is a thread."""

    exchange: Exchange

    def all_gather(self, value: Any) -> list[Any]:
        self.exchange.values[self.rank] = value
        self.exchange.barrier.wait(60)
        gathered = list(self.exchange.values)
        self.exchange.barrier.wait(60)
        return gathered

    def broadcast(self, value: Any) -> Any:
        return self.all_gather(value)[0]


def on_two_ranks(run: Path, work: Callable[[RunSaver], Any], **settings: Any) -> list[Any]:
    """The result or the exception of `work(saver)` on each of two ranks."""
    CheckpointDirectory(run).open()
    exchange = Exchange(threading.Barrier(2))

    def on_rank(rank: int) -> Any:
        world = ThreadWorld(rank, 2)
        object.__setattr__(world, "exchange", exchange)
        fragments = [whole(n, p.detach()) for n, p in model(1).named_parameters()]
        step: Any = SimpleNamespace(
            world=world,
            engine=SimpleNamespace(fragments=lambda: fragments[rank::2]),
            memory_of_lanes=lambda: [(n, memory(1, n)) for n in range(rank, NUM_LANES, 2)],
        )
        directory = CheckpointDirectory(run)
        saver = RunSaver(
            Checkpoints(directory, retention=Retention(keep=1)),
            header=HEADER,
            step=step,
            tracker=None,
            config=TrainingConfig(**{"num_steps": 20, "rank_timeout_seconds": 60, **settings}),
            scores=ScoreTable(directory, is_due=bool) if rank == 0 else None,
            saved_file=run / "saved",
            saved_step=None,
        )
        try:
            return work(saver)
        except TxlError as error:
            return error
        finally:
            saver.close()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(on_rank, range(2)))


def state(step: int, **changes: Any) -> TrainState:
    return TrainState(step=step, position=4 * step, **changes)


def score(step: int, nats: float) -> StepScore:
    return StepScore(step=step, nats=nats, tokens_scored=1, split="valid", max_tokens=None)


def test_saves_scores_and_removals_happen_in_the_order_of_the_calls(tmp_path: Path) -> None:
    def work(saver: RunSaver) -> None:
        for step in (1, 2, 3):
            saver.save(state(step))
            saver.wait()
            if saver._scores is not None and step < 3:
                saver._scores.add(score(step, 1.0 / step))
            saver.mark_best()
            saver.confirm()
        saver.finish(require_copies=True)

    assert on_two_ranks(tmp_path, work) == [None, None]
    directory = CheckpointDirectory(tmp_path)
    assert directory.steps() == [2, 3]
    expected = [state(2, best=score(1, 1.0)), state(3, best=score(2, 0.5))]
    assert [verify_checkpoint(directory.at(n)).state for n in (2, 3)] == [
        each.model_dump(mode="json") for each in expected
    ]
    assert (directory.pointer("LATEST"), directory.pointer("BEST")) == (3, 2)
    assert (tmp_path / "saved").exists()
    assert not list(directory.path.glob(".*"))
    assert len({verify_checkpoint(directory.at(step)).save_id for step in (2, 3)}) == 2


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_an_error_of_one_rank_is_raised_on_both_and_leaves_no_files(
    tmp_path: Path, failing_rank: int
) -> None:
    def work(saver: RunSaver) -> None:
        saver.save(state(1))
        saver.wait()
        rank = saver._step.world.rank
        if rank == failing_rank:
            saver._checkpoints.directory.begin = full  # type: ignore[method-assign]
        saver.save(state(2))
        if rank == failing_rank:
            saver._queue.wait(60)
            assert saver.has_failed
        saver.wait()

    def full(_: str) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    errors = on_two_ranks(tmp_path, work)
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert f"rank {failing_rank}: OSError: [Errno 28] No space left" in str(error)
    assert CheckpointDirectory(tmp_path).steps() == [1]
    assert not list(CheckpointDirectory(tmp_path).path.glob(".*"))


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_numbers_that_are_not_finite_are_the_cause_that_a_divergence_reports(
    tmp_path: Path, bad_rank: int
) -> None:
    def work(saver: RunSaver) -> str:
        if saver._step.world.rank == bad_rank:
            next(iter(saver._step.engine.fragments())).states["exp_avg"][-1] = float("nan")
        saver.save(state(1))
        return str(saver.wait_after(DivergedError("the loss of step 2 is nan")))

    for message in on_two_ranks(tmp_path, work):
        assert "after step 1 not all numbers are finite in optimizer" in message
        assert f"(rank {bad_rank})" in message
    assert CheckpointDirectory(tmp_path).steps() == []
    assert not list(CheckpointDirectory(tmp_path).path.glob(".*"))


def test_after_an_error_of_the_run_the_save_in_flight_is_completed(tmp_path: Path) -> None:
    assert on_two_ranks(tmp_path, lambda saver: saver.save(state(1))) == [None, None]
    directory = CheckpointDirectory(tmp_path)
    assert directory.steps() == [1]
    verify_checkpoint(directory.at(1))


def test_minutes_count_on_rank_0_from_the_last_save(tmp_path: Path) -> None:
    def work(saver: RunSaver) -> tuple[bool, bool]:
        before = saver.is_due
        saver._saved_at -= 61
        due = saver.is_due
        saver.save(state(1))
        return due, before or saver.is_due

    assert on_two_ranks(tmp_path / "1", work, checkpoint_interval_minutes=1) == [
        (True, False),
        (False, False),
    ]
    assert on_two_ranks(tmp_path / "2", work) == [(False, False)] * 2


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    def work(saver: RunSaver) -> tuple[bool, list[int]]:
        gate, write = threading.Event(), saver._write

        def slow_write(save: Any, *rest: Any) -> None:
            assert gate.wait(60)
            write(save, *rest)

        saver._write = slow_write  # type: ignore[method-assign]
        saver.save(state(1))
        returned_early = not saver._queue.wait(0)
        threading.Timer(0.2, gate.set).start()
        saver.save(state(2))
        return returned_early, saver._checkpoints.directory.steps()[:1]

    assert on_two_ranks(tmp_path, work) == [(True, [1])] * 2


def test_a_write_that_hangs_is_announced_and_ends_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(world_module, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(world_module, "NOTICE_SECONDS", 0.2)
    hangs, write = threading.Event(), Checkpoints.write_part

    def write_or_hang(checkpoints: Checkpoints, save: Save, snapshot: Snapshot) -> None:
        if save.rank == 0:
            hangs.wait(60)
        write(checkpoints, save, snapshot)

    monkeypatch.setattr(Checkpoints, "write_part", write_or_hang)

    def work(saver: RunSaver) -> None:
        saver.save(state(1))
        try:
            saver.wait()
        finally:
            hangs.set()

    errors = on_two_ranks(tmp_path, work, rank_timeout_seconds=1)
    for error in errors:
        assert isinstance(error, LostRankError)
        assert "checkpoint files of 1 rank (0)" in str(error)
        assert "made no progress for training.rank_timeout_seconds=1" in str(error)
    assert "of 2 ranks (0, 1)" in caplog.text or "of 1 rank (0)" in caplog.text
