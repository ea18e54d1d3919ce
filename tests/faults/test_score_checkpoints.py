"""`txl eval --watch` with killed workers, stops and kills: the scores of an undisturbed run."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.commands import is_alive, num_lines, output_of, start_txl, wait_until
from tests.support.training_runs import NO_EVALUATION
from tests.txl_dist.training.test_score_checkpoints import scores
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.runtime.fault_injection import FAULT_VARIABLE

pytestmark = pytest.mark.fault
SETTINGS = (
    "training.num_steps=60",
    "training.checkpoint_interval_steps=20",
    "training.keep_checkpoints=3",
    "evaluation.interval_steps=20",
    "evaluation.max_tokens=500",
    "evaluation.batch_chunks=2",
)
SOON_SECONDS = 20


@pytest.fixture
def run(straight: Callable[..., Path], tmp_path: Path) -> Path:
    """A finished run whose three checkpoints wait for a score."""
    return Path(shutil.copytree(straight(*SETTINGS, NO_EVALUATION), tmp_path / "run"))


def finish(run: Path, on: str = "processes", fault: str = "") -> str:
    """Watch to the end; the output."""
    words = ("eval", "--watch", run, "--on", on)
    process = start_txl(*words, environment={FAULT_VARIABLE: fault} if fault else {})
    return output_of(process, 0, timeout_seconds=240)


def assert_same(run: Path, expected: Path) -> None:
    assert scores(run) == scores(expected)
    best = CheckpointDirectory(expected).pointer("BEST")
    assert CheckpointDirectory(run).pointer("BEST") == best


@pytest.mark.fault_row(49)
@pytest.mark.parametrize("on", ["processes", "ray"])
def test_the_scores_of_killed_workers_are_those_of_an_uninterrupted_run(
    straight: Callable[..., Path], run: Path, on: str
) -> None:
    # Every worker is killed at its third batch, so each score needs several of them.
    finish(run, on, fault="score:kill:3")
    assert_same(run, straight(*SETTINGS))


@pytest.mark.fault_row(49)
def test_workers_that_always_die_leave_checkpoints_without_a_score(run: Path) -> None:
    output = finish(run, fault="score:kill:1")
    assert not scores(run)
    reasons = [line for line in output.splitlines() if "evaluation at step" in line]
    assert len(reasons) == 3
    assert "died by SIGKILL" in reasons[0]


@pytest.mark.fault_row(5, 41)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_the_next_start_computes_scores_that_a_stop_or_kill_prevented(
    straight: Callable[..., Path], run: Path, number: signal.Signals
) -> None:
    environment = {FAULT_VARIABLE: "score:sleep=60:2"}
    process = start_txl("eval", "--watch", run, environment=environment)
    wait_until(lambda: any(num_lines(p) > 1 for p in (run / "evaluations").glob("*.jsonl")))
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.communicate(timeout=SOON_SECONDS)
    wait_until(lambda: not any(is_alive(child.pid) for child in children), timeout_seconds=10)
    assert process.returncode == (75 if number == signal.SIGTERM else -number)
    assert not scores(run)
    finish(run)
    assert_same(run, straight(*SETTINGS))
