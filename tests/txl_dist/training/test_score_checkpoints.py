"""`txl eval --watch`: the scores and BEST of an evaluation on the ranks."""

import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.system.workers import InProcess
from tests.support.diverging_runs import NanWeight, train_with
from tests.support.training_runs import (
    DROPOUT,
    NO_EVALUATION,
    TinyRuns,
    losses,
    metrics,
    tiny_spec,
    train,
    train_some,
)
from tests.txl_dist.checkpoint.saving import save
from txl_dist.checkpoint.attempts import Attempt, AttemptRecord
from txl_dist.checkpoint.directory import CheckpointDirectory, Retention
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.errors import ConfigError, DataError, FencedError, TxlError
from txl_dist.evaluation import distributed
from txl_dist.training.scores import FOLDER, ScoreTable, StepScore, watch
from txl_dist.training.spec import LaunchFiles, RunDirectory, TrainSpec

SETTINGS = (
    "evaluation.max_tokens=700",
    "evaluation.interval_steps=5",
    "training.keep_checkpoints=1",
    # The loss rises with the rate on any text, so the best checkpoint is not the newest.
    "optimizer.lr=2.0",
    "optimizer.warmup_steps=20",
)
STEPS = [5, 10, 15, 20]


def scores(run: Path) -> list[dict[str, Any]]:
    """The evaluation lines of a run, in their order, without the time."""
    lines = [line for line in metrics(run) if "valid/loss" in line]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def unscored(dataset: Path, run: Path, *overrides: str) -> TrainSpec:
    """A spec that keeps every checkpoint whose evaluation is due, and evaluates nothing."""
    keep = ("training.keep_checkpoints=9", "training.checkpoint_interval_steps=5")
    return tiny_spec(dataset, run, *SETTINGS, *keep, *overrides, NO_EVALUATION)


def assert_same_scores(run: Path, expected: Path) -> None:
    """Scores, losses and BEST, bit for bit."""
    assert [line["step"] for line in scores(expected)] == STEPS
    assert scores(run) == scores(expected)
    assert losses(run) == losses(expected)
    best = CheckpointDirectory(expected).pointer("BEST")
    assert best is not None
    assert CheckpointDirectory(run).pointer("BEST") == best


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("precision=bf16",),
        ("precision=bf16", "deepspeed.zero_stage=3"),
        ("optimizer.averaging=asgd", "deepspeed.zero_stage=2"),
    ],
)
def test_scores_are_those_of_two_ranks(tiny: TinyRuns, options: tuple[str, ...]) -> None:
    run, expected = tiny.path / "watched", tiny.path / "ranks"
    tiny.trained(expected, *SETTINGS, *options)
    assert tiny.ranks(2).run(train, unscored(tiny.dataset, run, *options)) == [0, 0]
    assert watch(run, InProcess(), num_threads=1, note=print) == len(STEPS)
    assert_same_scores(run, expected)


@pytest.mark.slow
def test_scores_after_a_rollback_are_those_of_the_ranks(tiny: TinyRuns) -> None:
    run, expected = tiny.path / "watched", tiny.path / "ranks"
    options = ("divergence.policy=rollback", "training.checkpoint_interval_steps=4")
    keep = "training.keep_interval_steps=1"
    for spec in (
        tiny.spec(expected, *SETTINGS, *options),
        tiny.spec(run, *SETTINGS, *options, keep, NO_EVALUATION),
    ):
        ends = tiny.ranks(2).run(train_with, spec, NanWeight(rank=1, step=12))
        assert [code for code, *_ in ends] == [0, 0]
        assert any("returned from step 11" in event for event in ends[0][2])
    assert watch(run, InProcess(), num_threads=1, note=print) == 1, "checkpoints at 4, 8, ..."
    assert scores(run) == scores(expected)[-1:]
    assert losses(run) == losses(expected)


@pytest.mark.parametrize(
    "options",
    [(), ("model.memory=compressive", "model.compression_rate=3", *DROPOUT)],
    ids=["recurrent", "compressive with dropout"],
)
def test_a_finished_run_that_was_not_scored_is_scored_by_hand(
    tiny: TinyRuns, straight: Callable[..., Path], options: tuple[str, ...]
) -> None:
    """The scores, BEST and metrics of the run that has evaluated itself."""
    assert tiny.ranks(1).run(train, unscored(tiny.dataset, tiny.path, *options)) == [0]
    with pytest.raises(DataError, match="split 'test'"):
        watch(tiny.path, InProcess(), split="test", num_threads=1, note=print)
    assert watch(tiny.path, InProcess(), num_threads=1, note=print) == len(STEPS)
    assert_same_scores(tiny.path, straight(*SETTINGS, *options, num_ranks=1))
    again = partial(watch, tiny.path, InProcess(), num_threads=1, note=print)
    with LaunchFiles(tiny.path, "0123").held():  # a launcher that starts ranks again
        watching = threading.Thread(target=again)
        watching.start()
        watching.join(1.0)
        assert watching.is_alive(), "more checkpoints may come"
    watching.join(60)
    assert not watching.is_alive()
    assert len(scores(tiny.path)) == len(STEPS)


class ScoreBetweenSteps:
    """The scores of another run appear before a step, as if `txl eval --watch` had written them."""

    def __init__(self, step: int, scored: Path) -> None:
        self.step, self.scored = step, scored

    def __call__(self, trainer: Any) -> None:
        read, folder = (
            trainer.batches.read,
            trainer.saver._checkpoints.directory.path.parent / FOLDER,
        )

        def delayed() -> Any:
            if trainer.state.step + 1 == self.step:
                folder.mkdir()
                for number in range(5, self.step, 5):
                    name = f"step-{number:08d}.json"
                    (folder / name).write_bytes((self.scored / FOLDER / name).read_bytes())
                ScoreTable(trainer.saver._checkpoints.directory, bool).mark_best()
            return read()

        trainer.batches.read = delayed


def test_a_run_that_trains_logs_the_scores_and_keeps_the_best_checkpoint(
    tiny: TinyRuns, straight: Callable[..., Path]
) -> None:
    settings = (*SETTINGS, "training.checkpoint_interval_steps=5", NO_EVALUATION)
    spec = tiny.spec(tiny.path, *settings, "training.keep_checkpoints=2")
    (end,) = tiny.ranks(1).run(
        train_with, spec, ScoreBetweenSteps(12, straight(*SETTINGS, num_ranks=1))
    )
    assert end[0] == 0
    assert scores(tiny.path) == scores(straight(*SETTINGS, num_ranks=1))[:2]
    best = min(scores(tiny.path), key=lambda line: line["valid/loss"])["step"]
    assert CheckpointDirectory(tiny.path).pointer("BEST") == best
    assert CheckpointDirectory(tiny.path).steps() == sorted({best, 15, 20})


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run directory"):
        watch(tmp_path, InProcess(), num_threads=1, note=print)


def score_of(step: int, nats: float = 2.0) -> StepScore:
    return StepScore(step=step, nats=nats, tokens_scored=1, split="valid", max_tokens=None)


def tables(run: Path, *steps: int) -> tuple[ScoreTable, ScoreTable]:
    """Those of a run with checkpoints of these steps, all due, and of a process that scores."""
    directory = RunDirectory(run)
    directory.create()
    for step in steps:
        directory.checkpoints.at(step).mkdir(parents=True)
    return ScoreTable(directory.checkpoints, bool), ScoreTable(directory.checkpoints, bool)


def test_scores_are_found_once_in_the_order_of_steps(tmp_path: Path) -> None:
    table, other = tables(tmp_path, 10, 20)
    assert table.waiting() == [10, 20]
    for step in (20, 10):
        other.add(score_of(step))
    assert [score.step for score, _ in table.refresh()] == [10, 20]
    assert table.refresh() == []
    assert table.waiting() == []


def test_a_checkpoint_that_cannot_be_scored_is_tried_again_after_the_next_start(
    tmp_path: Path,
) -> None:
    table, other = tables(tmp_path, 10)
    other.add(score_of(10).model_copy(update={"nats": None, "reason": "the worker died"}))
    assert [score.reason for score, _ in table.refresh()] == ["the worker died"]
    assert table.best is None
    assert table.waiting() == []
    table.rewind(10)  # as at a start
    assert table.waiting() == [10]


def test_after_a_rollback_no_score_of_the_superseded_steps_counts(tmp_path: Path) -> None:
    table, other = tables(tmp_path, 10, 20, 30)
    table.add(score_of(20, nats=1.0))
    assert [score.step for score, _ in other.refresh()] == [20]
    table.rewind(10)
    assert other.refresh() == []
    assert other.get(20) is None
    CheckpointDirectory(tmp_path).rewind(10)
    assert table.waiting() == [10]
    assert table.best is None
    table.add(score_of(10))
    assert table.best_step == 10
    assert table.waiting() == []


def test_scores_that_arrive_just_before_a_rollback(tmp_path: Path) -> None:
    """Rank 0 has not looked at their files: the earlier is found, the later one removed."""
    table, other = tables(tmp_path, 5, 8, 10)
    for step in (5, 10):
        other.add(score_of(step))
    table.rewind(8)
    assert table.best_step_with_new_files == 5, "a rollback keeps BEST"
    CheckpointDirectory(tmp_path).rewind(8)
    assert [score.step for score, _ in table.refresh()] == [5]
    other.refresh()
    assert (other.best_step, other.waiting()) == (5, [8])


def test_a_score_of_a_superseded_save_of_the_step_does_not_count(tmp_path: Path) -> None:
    path = save(tmp_path, step=3)
    table = ScoreTable(CheckpointDirectory(tmp_path), is_due=bool)
    save_id = load_checkpoint_manifest(path).save_id
    for stored, is_counted in (("0" * 32, False), (save_id, True)):
        table.add(score_of(3).model_copy(update={"save_id": stored}))
        found = ScoreTable(CheckpointDirectory(tmp_path), is_due=bool)
        assert (found.get(3) is not None) is is_counted
        assert found.waiting() == ([] if is_counted else [3])


def test_a_run_that_saves_faster_than_it_is_scored_keeps_what_is_being_scored(
    tiny: TinyRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During an evaluation up to two more checkpoints are saved, and only the newest is kept."""
    assert tiny.ranks(1).run(train, unscored(tiny.dataset, tiny.path)) == [0]
    directory, later = CheckpointDirectory(tiny.path), [10, 15, 20]
    for step in later:
        directory.at(step).rename(tiny.path / str(step))
    evaluate = distributed.evaluate_on_workers

    def during_saves(planned: Any, workers: Any) -> Any:
        for step in later[:2]:
            (tiny.path / str(step)).rename(directory.at(step))
        del later[:2]
        directory.prune(Retention(keep=1), best_step=None)
        return evaluate(planned, workers)

    monkeypatch.setattr(distributed, "evaluate_on_workers", during_saves)
    seen: list[str] = []
    assert watch(tiny.path, InProcess(), num_threads=1, note=seen.append) == 3
    steps = [line.partition(" |")[0] for line in seen]
    assert steps == [f"evaluation at step {step}" for step in (5, 15, 20)]


def test_a_restart_logs_the_scores_that_came_after_the_last_save(
    tiny: TinyRuns, straight: Callable[..., Path]
) -> None:
    settings = (*SETTINGS, "training.checkpoint_interval_steps=5", NO_EVALUATION)
    spec = tiny.spec(tiny.path, *settings)
    assert tiny.ranks(1).run(train_some, spec, num_steps=12) == [TxlError.exit_code]
    name = f"{FOLDER}/step-00000005.json"
    (tiny.path / FOLDER).mkdir()
    shutil.copy(straight(*SETTINGS, num_ranks=1) / name, tiny.path / name)
    assert tiny.ranks(1).run(train, spec) == [0]
    assert scores(tiny.path) == scores(straight(*SETTINGS, num_ranks=1))[:1]


def test_a_replaced_run_writes_no_scores(tmp_path: Path) -> None:
    """Another host has begun a newer attempt: this one would score steps that it never had."""
    (table, _), folder = tables(tmp_path, 10), tmp_path / "attempts"
    attempts = [
        Attempt(AttemptRecord.of_this_process(number=n, launch_id=str(n)), folder) for n in (1, 2)
    ]
    table._checkpoints.attempt = attempts[0]
    for attempt in attempts:
        attempt.add()
    with pytest.raises(FencedError):
        table.add(score_of(10))
    assert not (tmp_path / FOLDER).exists()
