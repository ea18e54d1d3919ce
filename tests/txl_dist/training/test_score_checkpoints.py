"""`txl eval --watch`: the scores, BEST and checkpoints of an evaluation on the ranks."""

import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_pipeline.system.workers import InProcess
from tests.support.commands import txl
from tests.support.diverging_runs import NanWeight, train_with
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import TINY, losses, metrics, tiny_job, train
from tests.txl_dist.checkpoint.saving import save
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.errors import ConfigError
from txl_dist.runtime.world import World
from txl_dist.training import score_checkpoints as watch_module
from txl_dist.training import score_watch
from txl_dist.training.job import TrainJob
from txl_dist.training.rank import train_rank
from txl_dist.training.run_directory import RunDirectory
from txl_dist.training.score_checkpoints import watch
from txl_dist.training.score_watch import MAX_STARTS, ScoreWatch
from txl_dist.training.scores import ScoreTable, StepScore
from txl_dist.training.state import TrainState, load_state

SETTINGS = (
    "evaluation.max_tokens=700",
    "evaluation.interval_steps=5",
    "evaluation.max_waiting_checkpoints=9",
    "training.keep_checkpoints=1",
    # The loss rises with the rate on any text, so the best checkpoint is not the newest.
    "optimizer.lr=2.0",
    "optimizer.warmup_steps=20",
)
WORKERS = "evaluation.on=workers"
STEPS = [5, 10, 15, 20]


def with_popen(popen: Any) -> SimpleNamespace:
    """The module `subprocess` with another Popen, for one module only: `platform` uses it, too."""
    return SimpleNamespace(**{**vars(subprocess), "Popen": popen})


class ThreadProcess:
    """Scores in a thread of rank 0 instead of a process: ranks of a test can have no children."""

    pid = 0

    def __init__(self, command: list[str], **_: Any) -> None:
        self.code: int | None = None
        self.is_stopped = threading.Event()
        run = Path(command[command.index("--watch") + 1])
        self.thread = threading.Thread(target=self._watch, args=(run,), daemon=True)
        self.thread.start()

    def _watch(self, run: Path) -> None:
        watch(
            run,
            InProcess(),
            num_threads=torch.get_num_threads(),
            note=lambda line: None,
            is_training=lambda: not self.is_stopped.is_set(),
        )
        self.code = 0

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.is_stopped.set()

    def wait(self, timeout: float | None = None) -> None:
        self.thread.join(60)

    kill = terminate


def train_with_thread(world: World, job: TrainJob, *faults: Any) -> Any:
    """Train with a thread of rank 0 that scores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch_module, "POLL_SECONDS", 0.05)
        patch.setattr(score_watch, "POLL_SECONDS", 0.05)
        patch.setattr(score_watch, "subprocess", with_popen(ThreadProcess))
        patch.setattr(score_watch.os, "setpriority", lambda *_: None)
        return train_with(world, job, *faults) if faults else train_rank(job, world) and None


def scores(run: Path) -> list[dict[str, Any]]:
    """The evaluation lines of a run, in their order, without the time."""
    lines = [line for line in metrics(run) if "valid/loss" in line]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def states(run: Path) -> dict[int, TrainState]:
    directory = CheckpointDirectory(run)
    paths = {step: directory.at(step) for step in directory.steps()}
    return {
        # The best score when it was saved: the process that scores may have been behind.
        step: load_state(path, load_checkpoint_manifest(path)).model_copy(update={"best": None})
        for step, path in paths.items()
    }


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
    assert "evaluation at step 20 | loss" in (tmp_path / "logs" / "evaluation.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("precision=bf16", "deepspeed.zero_stage=3"),
        ("optimizer.averaging=ema", "deepspeed.zero_stage=2"),
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


@pytest.mark.slow
def test_scores_after_a_rollback_are_those_of_the_ranks(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    rollback = ("divergence.policy=rollback", "training.checkpoint_interval_steps=4")
    for on, function in (("ranks", train_with), ("workers", train_with_thread)):
        job = tiny_job(dataset, tmp_path / on, *SETTINGS, *rollback, f"evaluation.on={on}")
        ends = ranks(2).run(function, job, NanWeight(rank=1, step=12))
        assert [code for code, *_ in ends] == [0, 0]
        assert any("returned from step 11" in event for event in ends[0][2])
    run, expected = tmp_path / "workers", tmp_path / "ranks"
    assert [line["step"] for line in scores(run)] == [5, 10, 15, 20]
    assert scores(run) == scores(expected)
    assert losses(run) == losses(expected)
    assert states(run) == states(expected)


def test_a_finished_run_that_was_not_scored_is_scored_by_hand(
    ranks: RankGroups, dataset: Path, tmp_path: Path, on_ranks: Callable[[int], Path]
) -> None:
    """The scores, BEST and metrics of the run that has evaluated itself."""
    keep = ("training.keep_checkpoints=9", "training.checkpoint_interval_steps=5")
    job = tiny_job(dataset, tmp_path, *SETTINGS, *keep, "evaluation.split=null")
    assert ranks(1).run(train, job) == [0]
    with pytest.raises(ConfigError, match="names no split to score"):
        watch(tmp_path, InProcess(), num_threads=1, note=print)
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("split: null", "split: valid"))
    assert watch(tmp_path, InProcess(), num_threads=1, note=print) == len(STEPS)
    assert scores(tmp_path) == scores(on_ranks(1))
    best = CheckpointDirectory(on_ranks(1)).pointer("BEST")
    assert CheckpointDirectory(tmp_path).pointer("BEST") == best
    assert watch(tmp_path, InProcess(), num_threads=1, note=print) == 0
    assert len(scores(tmp_path)) == len(STEPS)


def test_checkpoints_that_wait_for_a_score_are_named_before_a_resume_on_ranks_removes_them(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    settings = (*SETTINGS, "optimizer.warmup_steps=2")
    begin = ("training={num_steps: 12, checkpoint_interval_steps: 5, keep_checkpoints: 3}",)
    job = tiny_job(dataset, tmp_path, *settings, *begin, "evaluation.split=null")
    assert ranks(1).run(train, job) == [0]
    assert CheckpointDirectory(tmp_path).steps() == [5, 10, 12]
    job = tiny_job(dataset, tmp_path, *settings, allow_change=("training.num_steps",))
    assert ranks(1).run(train, job) == [0]
    assert (
        "the checkpoints of steps 5, 10 get no score" in RunDirectory(tmp_path).log(0).read_text()
    )
    assert [line["step"] for line in scores(tmp_path)] == [15, 20]


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run directory"):
        watch(tmp_path, InProcess(), num_threads=1, note=print)


# --- the part in training -----------------------------------------------------------------------


class Processes:
    """Stands for subprocess.Popen: processes that end as the test wants."""

    def __init__(self) -> None:
        self.started: list[Processes] = []
        self.pid, self.code = 0, None

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.started.append(process := Processes())
        return process

    def poll(self) -> int | None:
        return self.code


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    processes = Processes()
    monkeypatch.setattr(score_watch, "subprocess", with_popen(processes))
    monkeypatch.setattr(score_watch.os, "setpriority", lambda *_: None)
    return processes


def score_of(step: int, nats: float = 2.0) -> StepScore:
    return StepScore(step=step, nats=nats, tokens_scored=1, split="valid", max_tokens=None)


def watched(run: Path, *steps: int) -> tuple[ScoreWatch, ScoreTable, list[int]]:
    """A run with checkpoints of these steps, all due, and the steps whose scores were announced."""
    directory, announced = RunDirectory(run), list[int]()
    directory.create()
    for step in steps:
        directory.checkpoints.at(step).mkdir(parents=True)
    table = ScoreTable(directory.checkpoints, is_due=bool)
    watch = ScoreWatch(
        directory,
        table,
        on="processes",
        timeout_seconds=60,
        announce=lambda score, gain: announced.append(score.step),
    )
    watch.start(TrainState())
    return watch, table, announced


def test_scores_are_announced_once_in_the_order_of_steps(
    tmp_path: Path, processes: Processes
) -> None:
    watch, _, announced = watched(tmp_path, 10, 20)
    other = ScoreTable(CheckpointDirectory(tmp_path), is_due=bool)
    assert not watch.is_over()
    for step in (20, 10):
        other.add(score_of(step))
    assert watch.is_over()
    assert watch.is_over()
    assert announced == [10, 20]


def test_a_process_that_keeps_dying_is_not_started_again(
    tmp_path: Path, processes: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    watch, _, _ = watched(tmp_path, 10, 20)
    for _ in range(MAX_STARTS):
        assert not watch.is_over()
        processes.started[-1].code = -signal.SIGKILL
    assert watch.is_over()
    assert len(processes.started) == MAX_STARTS
    assert "no more scores, also not of steps 10, 20: the process that scores" in caplog.text


def test_a_checkpoint_that_cannot_be_scored_is_announced_and_tried_again_by_the_next_start(
    tmp_path: Path, processes: Processes
) -> None:
    watch, table, announced = watched(tmp_path, 10)
    failed = score_of(10).model_copy(update={"nats": None, "reason": "the worker died"})
    ScoreTable(CheckpointDirectory(tmp_path), is_due=bool).add(failed)
    assert watch.is_over()
    assert announced == [10]
    assert table.best is None
    table.rewind(10)  # as at a start
    assert table.waiting() == [10]


def test_after_a_rollback_no_score_of_the_superseded_steps_counts(
    tmp_path: Path, processes: Processes
) -> None:
    watch, table, _ = watched(tmp_path, 10, 20, 30)
    other = ScoreTable(CheckpointDirectory(tmp_path), is_due=bool)  # of the other process
    table.add(score_of(20, nats=1.0))
    assert [score.step for score, _ in other.refresh()] == [20]
    table.rewind(10)
    assert other.refresh() == []
    assert other.get(20) is None
    CheckpointDirectory(tmp_path).rewind(10)
    assert not watch.is_over()
    assert table.best is None
    table.add(score_of(10))
    assert table.best_step == 10
    assert watch.is_over()


def test_scores_that_arrive_just_before_a_rollback(tmp_path: Path, processes: Processes) -> None:
    """Rank 0 has not looked at their files: the earlier is announced, the later one removed."""
    watch, table, announced = watched(tmp_path, 5, 8, 10)
    other = ScoreTable(CheckpointDirectory(tmp_path), is_due=bool)
    for step in (5, 10):
        other.add(score_of(step))
    table.rewind(8)
    CheckpointDirectory(tmp_path).rewind(8)
    watch.poll()
    assert announced == [5]
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
