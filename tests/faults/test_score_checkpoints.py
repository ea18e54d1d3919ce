"""Evaluation on workers, with killed workers, stops and kills: the scores of an undisturbed run."""

import signal
from pathlib import Path

import psutil
import pytest

from tests.support.commands import is_alive, num_lines, start_txl, wait_until
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import TINY, losses, tiny_job, train
from tests.txl_dist.training.test_score_checkpoints import scores
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.runtime.fault_injection import FAULT_VARIABLE

pytestmark = pytest.mark.fault
NUM_STEPS = 60
SETTINGS = (
    f"training.num_steps={NUM_STEPS}",
    "training.checkpoint_interval_steps=10",
    "evaluation.interval_steps=20",
    "evaluation.max_tokens=500",
    "evaluation.batch_chunks=2",
    "evaluation.max_waiting_checkpoints=9",
)
SOON_SECONDS = 20


@pytest.fixture(scope="module")
def straight(ranks: RankGroups, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that scores on its ranks, undisturbed."""
    run = tmp_path_factory.mktemp("straight")
    assert ranks(2).run(train, tiny_job(dataset, run, *SETTINGS)) == [0, 0]
    return run


def command(dataset: Path, run: Path, on: str = "processes") -> tuple[object, ...]:
    overrides = (f"data.path={dataset}", f"directory={run}", "evaluation.on=workers", *SETTINGS)
    return ("train", TINY, *overrides, "--on", on, "--ranks", 2)


def finish(words: tuple[object, ...], fault: str = "") -> str:
    """Run to the end; the output."""
    process = start_txl(*words, environment={FAULT_VARIABLE: fault} if fault else {})
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def assert_same(run: Path, expected: Path) -> None:
    assert scores(run) == scores(expected)
    assert losses(run) == losses(expected)
    best = CheckpointDirectory(expected).pointer("BEST")
    assert CheckpointDirectory(run).pointer("BEST") == best


@pytest.mark.fault_row(49)
@pytest.mark.parametrize("on", ["processes", "ray"])
def test_the_scores_of_killed_workers_are_those_of_an_uninterrupted_run(
    dataset: Path, straight: Path, tmp_path: Path, on: str
) -> None:
    # Every worker is killed at its third batch, so each score needs several of them.
    finish(command(dataset, tmp_path, on), fault="score:kill:3")
    assert_same(tmp_path, straight)


@pytest.mark.fault_row(49)
def test_workers_that_always_die_do_not_end_training(
    dataset: Path, straight: Path, tmp_path: Path
) -> None:
    output = finish(command(dataset, tmp_path), fault="score:kill:1")
    assert losses(tmp_path) == losses(straight)
    assert not scores(tmp_path)
    warnings = [line for line in output.splitlines() if "WARNING: no score" in line]
    assert len(warnings) == 3
    assert "died by SIGKILL" in warnings[0]


@pytest.mark.fault_row(5, 41)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("is_last", [False, True])
def test_the_next_start_computes_scores_that_a_stop_or_kill_prevented(
    dataset: Path, straight: Path, tmp_path: Path, number: signal.Signals, is_last: bool
) -> None:
    # The worker is slow: when the signal is sent, it is scoring the first checkpoint, and training
    # continues. The signal comes at the end of training, or before it.
    fault = "score:sleep=4:2" if is_last else "score:sleep=60:2,step:sleep=0.2:25"
    process = start_txl(*command(dataset, tmp_path), environment={FAULT_VARIABLE: fault})
    lines = NUM_STEPS if is_last else 24
    evaluations = tmp_path / "evaluations"
    wait_until(
        lambda: (
            num_lines(tmp_path / "metrics.jsonl") >= lines
            and any(num_lines(path) > 1 for path in evaluations.glob("*.jsonl"))
        )
    )
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.communicate(timeout=SOON_SECONDS)
    wait_until(lambda: not any(is_alive(child.pid) for child in children), timeout_seconds=10)
    assert process.returncode == (75 if number == signal.SIGTERM else -number)
    assert len(scores(tmp_path)) < 3
    finish(command(dataset, tmp_path))
    assert_same(tmp_path, straight)
