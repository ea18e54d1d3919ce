"""`evaluation.on: workers`: the scores, BEST and checkpoints of an evaluation on the ranks."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.system.workers import InProcess, Workers
from tests.support.commands import txl
from tests.support.diverging_runs import NanWeight, train_with
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import TINY, losses, metrics, tiny_job, train
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.config.training_config import EvaluationConfig
from txl_dist.errors import DivergedError, TxlError
from txl_dist.evaluation.batch_scores import NonFiniteScoreError
from txl_dist.evaluation.evaluate import EvaluationResult
from txl_dist.runtime.world import World
from txl_dist.training.checkpoint_scorer import MAX_FAILURES, CheckpointScorer
from txl_dist.training.job import TrainJob
from txl_dist.training.loop import Trainer
from txl_dist.training.rank import train_rank
from txl_dist.training.state import BestScore, TrainState, load_state

SETTINGS = (
    "evaluation.max_tokens=700",
    "evaluation.interval_steps=5",
    "evaluation.max_waiting_checkpoints=9",
    "training.keep_checkpoints=1",
    "optimizer.lr=0.3",  # the loss rises again, so the best checkpoint is not the newest
)
WORKERS = "evaluation.on=workers"
STEPS = [5, 10, 15, 20]


def train_with_thread(world: World, job: TrainJob) -> None:
    """Train with a worker that is a thread of rank 0: the same code without a process."""
    train_rank(job, world, open_workers=lambda log: nullcontext(InProcess()))


def scores(run: Path) -> list[dict[str, Any]]:
    """The evaluation lines of a run, in their order, without the time."""
    lines = [line for line in metrics(run) if "valid/loss" in line]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def states(run: Path) -> dict[int, TrainState]:
    directory = CheckpointDirectory(run)
    paths = {step: directory.at(step) for step in directory.steps()}
    return {step: load_state(path, load_checkpoint_manifest(path)) for step, path in paths.items()}


def assert_same(run: Path, expected: Path) -> None:
    """Scores, losses, BEST, and the checkpoints with what they store, bit for bit."""
    assert [line["step"] for line in scores(expected)] == STEPS
    assert scores(run) == scores(expected)
    assert losses(run) == losses(expected)
    best = CheckpointDirectory(expected).pointer("BEST")
    assert best is not None
    assert best < STEPS[-1], "retention has something to keep"
    assert CheckpointDirectory(run).pointer("BEST") == best
    assert states(run) == states(expected)
    assert states(run).keys() == {best, STEPS[-1]}
    for line in scores(run):
        if (state := states(run).get(line["step"])) is not None:
            assert state.score is not None
            assert state.score.nats_per_token == line["valid/loss"]


@pytest.fixture(scope="module")
def on_ranks(
    ranks: RankGroups, dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """The run that scores on its ranks, by number of ranks."""
    runs: dict[int, Path] = {}

    def run_of(num_ranks: int) -> Path:
        if num_ranks not in runs:
            runs[num_ranks] = tmp_path_factory.mktemp(f"on-{num_ranks}-ranks")
            job = tiny_job(dataset, runs[num_ranks], *SETTINGS)
            assert ranks(num_ranks).run(train, job) == [0] * num_ranks
        return runs[num_ranks]

    return run_of


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_scores_and_checkpoints_are_those_of_the_ranks(
    ranks: RankGroups,
    dataset: Path,
    tmp_path: Path,
    on_ranks: Callable[[int], Path],
    num_ranks: int,
) -> None:
    job = tiny_job(dataset, tmp_path, WORKERS, *SETTINGS)
    ranks(num_ranks).run(train_with_thread, job)
    assert_same(tmp_path, on_ranks(num_ranks))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_process_computes_the_scores_of_the_ranks(
    dataset: Path, tmp_path: Path, on_ranks: Callable[[int], Path], num_ranks: int
) -> None:
    words = (f"data.path={dataset}", f"directory={tmp_path}", WORKERS, *SETTINGS)
    ended = txl("train", TINY, *words, "--on", "processes", "--ranks", num_ranks)
    assert ended.returncode == 0, ended.stderr
    assert_same(tmp_path, on_ranks(num_ranks))
    assert "scoring chunks" in (tmp_path / "logs" / "evaluation.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("precision=bf16", "deepspeed.zero_stage=3"),
        ("optimizer.averaging=ema", "deepspeed.zero_stage=2"),
        ("training.changes=[{step: 12, tgt_len: 4, mem_len: 5}]",),
    ],
)
def test_scores_are_those_of_the_ranks_with_other_settings(
    ranks: RankGroups, dataset: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    runs = tmp_path / "ranks", tmp_path / "workers"
    assert ranks(2).run(train, tiny_job(dataset, runs[0], *SETTINGS, *options)) == [0, 0]
    ranks(2).run(train_with_thread, tiny_job(dataset, runs[1], WORKERS, *SETTINGS, *options))
    assert scores(runs[1]) == scores(runs[0])
    assert [line["step"] for line in scores(runs[0])] == STEPS


class ScoreInThread:
    """The worker is a thread of rank 0."""

    def __call__(self, trainer: Trainer) -> None:
        if trainer.worker_evaluation.scorer is not None:
            trainer.worker_evaluation.scorer._open_workers = InProcess


@pytest.mark.slow
def test_scores_after_a_rollback_are_those_of_the_ranks(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    rollback = ("divergence.policy=rollback", "training.checkpoint_interval_steps=4")
    for on in ("ranks", "workers"):
        job = tiny_job(dataset, tmp_path / on, *SETTINGS, *rollback, f"evaluation.on={on}")
        ends = ranks(2).run(train_with, job, NanWeight(rank=1, step=12), ScoreInThread())
        assert [code for code, *_ in ends] == [0, 0]
        assert any("returned from step 11" in event for event in ends[0][2])
    run, expected = tmp_path / "workers", tmp_path / "ranks"
    assert [line["step"] for line in scores(run)] == [5, 10, 15, 20]
    assert scores(run) == scores(expected)
    assert losses(run) == losses(expected)
    assert states(run) == states(expected)


class Overflow:
    """The model overflows on the text of the evaluation."""

    def __call__(self, trainer: Trainer) -> None:
        assert trainer.worker_evaluation.scorer is not None
        trainer.worker_evaluation.scorer._score = self.raise_error  # type: ignore[method-assign]

    @staticmethod
    def raise_error(*_: object) -> tuple[int, EvaluationResult]:
        raise NonFiniteScoreError("the sum of its losses is nan")


def test_a_loss_that_is_not_finite_ends_the_run_as_on_the_ranks(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    job = tiny_job(dataset, tmp_path, WORKERS, *SETTINGS)
    ((code, message, _),) = ranks(1).run(train_with, job, ScoreInThread(), Overflow())
    assert code == DivergedError.exit_code
    assert message.startswith("after step 5, the sum of its losses is nan")


# --- the queue ----------------------------------------------------------------------------------


class StubScorer(CheckpointScorer):
    """Scores a step when the test allows it; `failing` steps raise."""

    failing: tuple[int, ...] = ()

    def _score(
        self, step: int, workers: Workers, is_wanted: Callable[[], bool]
    ) -> tuple[int, EvaluationResult]:
        self.begun.append(step)
        self.allowed.acquire()
        if step in self.failing:
            raise TxlError("the worker died")
        return step, RESULT


RESULT: Any = "result"


@contextmanager
def scorer(tmp_path: Path, *, max_waiting: int = 2) -> Iterator[StubScorer]:
    directory = CheckpointDirectory(tmp_path)
    split: Any = None  # only `_score` needs it
    StubScorer.begun, StubScorer.allowed = [], threading.Semaphore(0)  # type: ignore[attr-defined]
    scorer = StubScorer(
        directory,
        split,
        EvaluationConfig(max_waiting_checkpoints=max_waiting),
        open_workers=InProcess,
        close_workers=lambda: None,
    )
    yield scorer
    scorer.allowed.release(100)
    scorer.close()


def allow(scorer: StubScorer, *, num: int) -> list[tuple[int, Any, str]]:
    """Let `num` checkpoints be scored; what was finished, in order."""
    outcomes = list(scorer.take())
    for _ in range(num):
        scorer.allowed.release()
        assert scorer.wait(10)
        outcomes += scorer.take()
    return [(outcome.step, outcome.result, outcome.reason) for outcome in outcomes]


def submit(scorer: StubScorer, step: int) -> None:
    scorer.submit(step)
    while scorer.begun == []:
        os.sched_yield()


def test_scores_come_in_the_order_of_steps_and_the_oldest_that_waits_is_skipped(
    tmp_path: Path,
) -> None:
    with scorer(tmp_path) as queue:
        for step in (10, 20, 30, 40):
            submit(queue, step)
        (skipped,) = queue.take()
        assert (skipped.step, skipped.result) == (20, None)
        assert "faster than they are scored" in skipped.reason
        assert allow(queue, num=3) == [(10, RESULT, ""), (30, RESULT, ""), (40, RESULT, "")]


def test_after_a_rollback_no_score_of_the_abandoned_steps_is_reported(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    directory.at(5).mkdir(parents=True)
    with scorer(tmp_path) as queue:
        for step in (10, 20):
            submit(queue, step)
        queue.restart((3, 5, 6), last_step=6)  # 6 is still being written, 3 was removed
        (missing,) = queue.take()
        assert (missing.step, missing.reason) == (3, "its checkpoint is not in the run directory")
        queue.allowed.release()  # 10, which is in progress, is dropped
        assert allow(queue, num=2) == [(5, RESULT, ""), (6, RESULT, "")]


def test_a_worker_that_keeps_failing_is_not_started_again(tmp_path: Path) -> None:
    with scorer(tmp_path, max_waiting=9) as queue:
        queue.failing = tuple(range(10))
        for step in range(MAX_FAILURES + 1):
            submit(queue, step)
        outcomes = allow(queue, num=MAX_FAILURES)
        assert queue.wait(10)
        outcomes += [(o.step, o.result, o.reason) for o in queue.take()]
        assert [step for step, _, _ in outcomes] == list(range(MAX_FAILURES + 1))
        assert {result for _, result, _ in outcomes} == {None}
        assert "failed too often" in outcomes[-1][2]
        assert queue.begun == list(range(MAX_FAILURES))


def test_what_waits_too_long_is_given_up_and_finished_scores_stay(tmp_path: Path) -> None:
    with scorer(tmp_path) as queue:
        for step in (1, 2, 3):
            submit(queue, step)
        queue.allowed.release()
        assert queue.wait(10)
        queue.give_up("no progress in 7 s")
        assert [(o.step, o.reason) for o in queue.take()] == [
            (1, ""),
            (2, "no progress in 7 s"),
            (3, "no progress in 7 s"),
        ]


# --- the state ----------------------------------------------------------------------------------


def score_of(step: int, nats: float) -> BestScore:
    return BestScore(step=step, nats_per_token=nats, split="valid", max_tokens=None)


def test_a_score_of_an_earlier_step_changes_only_what_belongs_to_it() -> None:
    state = TrainState(step=8, unscored_steps=(4, 6, 8), score=score_of(8, 3.0))
    after = state.with_score(score_of(4, 5.0))
    assert after.unscored_steps == (6, 8)
    assert after.best == score_of(4, 5.0)
    assert after.score == state.score
    assert after.with_score(score_of(6, 7.0)).best == score_of(4, 5.0)


def test_missing_scores_move_to_where_the_resumed_run_computes_them() -> None:
    by_workers = TrainState(step=8, unscored_steps=(4, 8))
    by_ranks = TrainState(step=8, evaluation_pending=True)
    assert by_ranks.scored_on("workers") == TrainState(step=8, unscored_steps=(8,))
    assert by_workers.scored_on("ranks") == by_ranks
    assert by_workers.scored_on("workers") == by_workers
    for state in (by_ranks, by_workers):
        assert state.scored_on(None) == TrainState(step=8)
