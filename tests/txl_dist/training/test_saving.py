"""A run saves before it evaluates, in the background, only finite numbers, into its own directory.

The saver alone has two ranks that are threads of one process, without an engine or steps.
"""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.training_runs import (
    NO_EVALUATION,
    ZERO,
    TinyRuns,
    losses,
    metrics,
    opened_trainer,
    refusal,
    train,
)
from tests.txl_dist.checkpoint.saving import HEADER, NUM_LANES, memory, model, whole
from txl_dist.checkpoint.checkpoints import Checkpoints, Save
from txl_dist.checkpoint.directory import CheckpointDirectory, Retention, resolve_checkpoint
from txl_dist.checkpoint.tensors import Snapshot, verify_checkpoint
from txl_dist.config.training_config import TrainingConfig
from txl_dist.errors import CheckpointError, DivergedError, LostRankError, TxlError
from txl_dist.runtime import world as world_module
from txl_dist.runtime.stop import StopRequest
from txl_dist.runtime.world import World
from txl_dist.training.loop import Trainer
from txl_dist.training.report import Observer
from txl_dist.training.saving import RunSaver
from txl_dist.training.scores import ScoreTable, StepScore
from txl_dist.training.spec import TrainSpec
from txl_dist.training.state import TrainState, load_state

SETTINGS = ("evaluation.max_tokens=300", "training.checkpoint_interval_steps=5")
CLOCK = (
    "time", "tokens_per_second", "mfu", "peak_flops", "data_wait", "save_wait", "evaluation_wait",
    "goodput", "seconds_left",
)  # fmt: skip
"""Metrics that depend on the machine and differ between any two runs."""
RESUMES = ("restarts", "lost_steps")
"""Metrics that tell a resumed run from an uninterrupted one."""


def train_changed(
    world: World, spec: TrainSpec, change: Callable[..., None], *args: Any
) -> tuple[int, str]:
    """Run a spec after `change(trainer, *args)`; exit code and message of what ended it."""
    with opened_trainer(world, spec) as trainer:
        change(trainer, *args)
        try:
            trainer.run()
        except TxlError as error:
            return error.exit_code, str(error)
    return 0, ""


def computed(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without those metrics."""
    left_out = (*CLOCK, *RESUMES)
    return [{k: v for k, v in line.items() if k not in left_out} for line in metrics(run)]


def state_at(run: Path, step: int) -> TrainState:
    path = CheckpointDirectory(run).at(step)
    return load_state(path, verify_checkpoint(path))


# --- a stop in the evaluation -------------------------------------------------------------------


class StopInEvaluation:
    """True from the `polls`-th time it is read while the evaluation of `step` is pending."""

    def __init__(self, trainer: Trainer, step: int, polls: int) -> None:
        self.trainer, self.step, self.polls = trainer, step, polls

    def __bool__(self) -> bool:
        state = self.trainer.state
        if state.step == self.step and self.trainer.evaluation_is_pending:
            self.polls -= 1
        return self.polls <= 0


def stop_in_evaluation(trainer: Trainer, step: int, only_rank: int | None) -> None:
    if only_rank in (None, trainer.step.world.rank):
        trainer.stop = StopInEvaluation(trainer, step, polls=3)  # type: ignore[assignment]


@pytest.mark.parametrize("only_rank", [None, 1])
@pytest.mark.parametrize("step", [pytest.param(10, marks=pytest.mark.slow), 14, 20])
def test_a_stop_in_the_evaluation_saves_first_and_the_resumed_run_equals_an_uninterrupted_one(
    tiny: TinyRuns, step: int, only_rank: int | None
) -> None:
    settings = (*SETTINGS, f"evaluation.interval_steps={step}", "evaluation.batch_chunks=1")
    straight = tiny.trained("straight", *settings)
    spec = tiny.spec("stopped", *settings)
    ends = tiny.ranks(2).run(train_changed, spec, stop_in_evaluation, step, only_rank)
    assert [code for code, _ in ends] == [75, 75]
    assert f"stopped on request after step {step}" in ends[0][1]
    assert CheckpointDirectory(spec.run_path).steps()[-1] == step
    assert not any("valid/loss" in line for line in metrics(spec.run_path))

    assert tiny.ranks(2).run(train, spec) == [0, 0]
    assert computed(spec.run_path) == computed(straight)
    assert state_at(spec.run_path, 20) == state_at(straight, 20)
    best = (straight / "BEST").read_text()
    assert (spec.run_path / "BEST").read_text() == best


class CopyAtScore(Observer):
    """Copies the run as a kill between writing the score and its line in the metrics leaves it."""

    def __init__(self, trainer: Trainer, copy: Path) -> None:
        self.trainer, self.copy = trainer, copy

    def score(self, score: StepScore, gain: float | None) -> None:
        if score.step == 10:
            self.trainer.saver.wait()  # one rank: not collective
            shutil.copytree(Path(self.trainer.config.directory), self.copy)


def keep_copy_before_line(trainer: Trainer, copy: Path) -> None:
    trainer.observers.insert(0, CopyAtScore(trainer, copy))


def test_a_kill_between_a_score_and_its_line_writes_it_once(tiny: TinyRuns) -> None:
    settings = (*SETTINGS, "evaluation.interval_steps=10")
    straight = tiny.spec("straight", *settings)
    assert tiny.ranks(1).run(
        train_changed, straight, keep_copy_before_line, tiny.path / "killed"
    ) == [(0, "")]
    spec = tiny.spec("killed", *settings)
    assert "valid/loss" not in computed(spec.run_path)[-1]
    assert tiny.ranks(1).run(train, spec) == [0]
    assert computed(spec.run_path) == computed(straight.run_path)


def test_a_pending_evaluation_is_dropped_by_a_run_that_does_not_evaluate(tiny: TinyRuns) -> None:
    spec = tiny.spec(tiny.path, *SETTINGS, "evaluation.batch_chunks=1")
    ends = tiny.ranks(1).run(train_changed, spec, stop_in_evaluation, 10, None)
    assert ends[0][0] == 75
    tiny.trained(tiny.path, *SETTINGS, NO_EVALUATION, num_ranks=1)
    assert not any("valid/loss" in line for line in metrics(tiny.path))


# --- saves in the background ---------------------------------------------------------------------

SAVES = (NO_EVALUATION, "training.checkpoint_interval_steps=5", "training.keep_checkpoints=9")


def train_with_slow_disk(world: World, spec: TrainSpec, rank: int) -> tuple[int, str]:
    """A save of `rank` takes until 3 more steps have been trained, except at the end."""
    write_part = Checkpoints.write_part
    trainers: list[Trainer] = []

    def write_late(checkpoints: Checkpoints, save: Save, snapshot: Snapshot) -> None:
        deadline = time.monotonic() + 60
        while save.rank == rank and trainers[0].state.step < min(20, save.state["step"] + 3):
            assert time.monotonic() < deadline, "the loop waits for the save"
            time.sleep(0.001)
        write_part(checkpoints, save, snapshot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "write_part", write_late)
        return train_changed(world, spec, trainers.append)


@pytest.mark.parametrize("stage", ["1", pytest.param("3-all-spread", marks=pytest.mark.slow)])
def test_steps_go_on_while_a_checkpoint_is_written_and_it_holds_the_state_of_its_step(
    tiny: TinyRuns, stage: str
) -> None:
    straight = tiny.trained("straight", *SAVES, *ZERO[stage])
    slow = tiny.spec("slow", *SAVES, *ZERO[stage])
    assert tiny.ranks(2).run(train_with_slow_disk, slow, 1) == [(0, "")] * 2
    assert losses(slow.run_path) == losses(straight)
    for step in (5, 10, 15, 20):
        expected, actual = (
            verify_checkpoint(CheckpointDirectory(run).at(step)).files
            for run in (straight, slow.run_path)
        )
        assert actual == expected, "the same bytes"


@pytest.mark.slow
def test_a_checkpoint_is_saved_when_minutes_have_passed_on_rank_0(tiny: TinyRuns) -> None:
    settings = (*SAVES, "training.checkpoint_interval_steps=99", "training.num_steps=6")
    minutes = "training.checkpoint_interval_minutes=1e-6"
    tiny.trained(tiny.path, *settings, minutes)
    assert CheckpointDirectory(tiny.path).steps() == [1, 2, 3, 4, 5, 6]


# --- numbers that are not finite ----------------------------------------------------------------


def poison_before_save(trainer: Trainer, step: int, rank: int, kind: str) -> None:
    """Make one number of one rank not finite, after the finite loss of `step`."""
    save = trainer.saver.save

    def poisoned(state: TrainState) -> None:
        if state.step == step and trainer.step.world.rank == rank:
            if kind == "memory":
                trainer.step.memories[0][0].layers[1][0, -1, -1] = float("inf")
            else:
                fragment = next(iter(trainer.step.engine.fragments()))
                tensor = fragment.master if kind == "weights" else fragment.states["exp_avg"]
                tensor.view(-1)[-1] = float("nan")
        save(state)

    trainer.saver.save = poisoned  # type: ignore[method-assign]


@pytest.mark.fault_row(28)
@pytest.mark.parametrize(
    ("stage", "kind"),
    [("0", "weights"), ("1", "optimizer"), ("2", "memory"), ("3-all-spread", "weights")],
)
def test_a_non_finite_number_on_one_rank_prevents_the_save_on_all(
    tiny: TinyRuns, stage: str, kind: str
) -> None:
    settings = (NO_EVALUATION, *SETTINGS, "training.keep_checkpoints=1", *ZERO[stage])
    spec = tiny.spec(tiny.path, *settings)
    ends = tiny.ranks(2).run(train_changed, spec, poison_before_save, 10, 1, kind)
    assert [code for code, _ in ends] == [5, 5]
    for _, message in ends:
        assert f"after step 10 not all numbers are finite in {kind}" in message
        assert "(rank 1)" in message
        assert f"--resume {CheckpointDirectory(tiny.path).at(5)}" in message
    assert CheckpointDirectory(tiny.path).steps() == [5]
    assert resolve_checkpoint(tiny.path / "LATEST") == CheckpointDirectory(tiny.path).at(5)


@pytest.mark.fault_row(28)
@pytest.mark.parametrize(("lr", "steps"), [("1e39", [5]), ("1e36", [5, 6])])
def test_a_learning_rate_that_overflows_leaves_the_last_good_checkpoint(
    tiny: TinyRuns, lr: str, steps: list[int]
) -> None:
    """The first loss is finite. Then the weights are not finite; or they are, but their loss."""
    settings = (NO_EVALUATION, "training.keep_checkpoints=1", "optimizer.schedule=constant")
    first = (*settings, "training.num_steps=5")
    tiny.trained(tiny.path, *first)

    further = (*settings, "training.checkpoint_interval_steps=1")
    allowed = ("training.num_steps", "optimizer.lr", "optimizer.schedule")
    hot = tiny.spec(tiny.path, *further, f"optimizer.lr={lr}", allow_change=allowed)
    assert tiny.ranks(2).run(train, hot) == [5, 5]
    assert f"--resume {CheckpointDirectory(tiny.path).at(5)}" in refusal(tiny.path)
    assert CheckpointDirectory(tiny.path).steps() == steps
    if steps == [5]:
        tiny.trained(tiny.path, *further, allow_change=allowed)


def nan_in_evaluation(trainer: Trainer, step: int) -> None:
    evaluate = trainer.evaluate
    assert evaluate is not None

    def poisoned(state: TrainState, stop: StopRequest) -> StepScore | None:
        if trainer.state.step == step and trainer.step.world.rank == 1:
            with trainer.step.engine.whole_model() as model:
                next(model.parameters()).data.view(-1)[:] = float("nan")
        return evaluate(state, stop)

    trainer.evaluate = poisoned


def test_a_nan_in_the_evaluation_is_a_divergence_that_names_split_and_step(tiny: TinyRuns) -> None:
    settings = (*SETTINGS, "evaluation.interval_steps=5", "training.keep_checkpoints=1")
    spec = tiny.spec(tiny.path, *settings, "deepspeed.zero_stage=0")
    ends = tiny.ranks(2).run(train_changed, spec, nan_in_evaluation, 10)
    assert [code for code, _ in ends] == [5, 5]
    for _, message in ends:
        assert "the loss of split valid after step 10 is nan" in message
        assert f"--resume {CheckpointDirectory(tiny.path).at(5)}" in message
    assert CheckpointDirectory(tiny.path).steps() == [5, 10]


# --- the run directory --------------------------------------------------------------------------


def remove_run_directory(trainer: Trainer, step: int) -> None:
    confirm = trainer.saver.confirm

    def removing() -> None:
        if trainer.state.step == step:
            trainer.saver.wait()
        if trainer.state.step == step and trainer.step.world.is_rank_zero:
            shutil.rmtree(trainer.config.directory)
        confirm()

    trainer.saver.confirm = removing  # type: ignore[method-assign]


@pytest.mark.parametrize("step", [7, 19])
def test_a_run_directory_removed_during_the_run_is_an_error(tiny: TinyRuns, step: int) -> None:
    spec = tiny.spec("run", NO_EVALUATION, *SETTINGS)
    ends = tiny.ranks(2).run(train_changed, spec, remove_run_directory, step)
    assert [code for code, _ in ends] == [4, 4]
    assert "is gone" in ends[1][1]
    assert not (tiny.path / "run").exists()


def test_best_is_updated_when_a_run_resumes_from_an_older_checkpoint(tiny: TinyRuns) -> None:
    settings = (*SETTINGS, "evaluation.interval_steps=5", "training.keep_checkpoints=9")
    spec = tiny.spec(tiny.path, *settings)
    assert tiny.ranks(1).run(train, spec) == [0]
    directory = CheckpointDirectory(tiny.path)
    assert resolve_checkpoint(tiny.path / "BEST") != directory.at(5)
    for step in directory.steps()[1:]:
        (directory.at(step) / "manifest.json").write_text("damaged")
    ends = tiny.ranks(1).run(train_changed, spec, stop_immediately)
    assert ends[0][0] == 75
    assert resolve_checkpoint(tiny.path / "BEST") == directory.at(5)


def stop_immediately(trainer: Trainer) -> None:
    trainer.stop = True  # type: ignore[assignment]


# --- the saver alone ------------------------------------------------------------------------------


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
