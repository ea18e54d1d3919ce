"""Faults at exact moments of a save, by TXL_FAULT: the run resumes as if nothing had happened."""

import signal
import time
from pathlib import Path

import pytest

from tests.support.commands import start_txl, txl, wait_until
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, TINY, losses, tiny_spec, train
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.reader import verify_checkpoint
from txl_dist.runtime.fault_injection import FAULT_VARIABLE

pytestmark = pytest.mark.fault


@pytest.fixture(scope="module")
def straight(ranks: RankGroups, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run."""
    run = tmp_path_factory.mktemp("straight")
    assert ranks(2).run(train, tiny_spec(dataset, run, NO_EVALUATION)) == [0, 0]
    return run


def command(dataset: Path, run: Path) -> tuple[object, ...]:
    overrides = (f"data.path={dataset}", f"directory={run}", NO_EVALUATION)
    return ("train", TINY, *overrides, "--on", "processes", "--ranks", 2)


def saves_in_progress(checkpoints: CheckpointDirectory) -> bool:
    return any(checkpoints.path.glob(checkpoints.staging("*").name))


@pytest.mark.fault_row(8, 9)
@pytest.mark.parametrize(
    ("point", "rank", "steps"),
    [("save/files", 1, [6]), ("save/manifest", 0, [6]), ("save/latest", 0, [6, 12])],
)
def test_a_kill_during_a_save_leaves_complete_checkpoints_only(
    dataset: Path, straight: Path, tmp_path: Path, point: str, rank: int, steps: list[int]
) -> None:
    """The second save, of step 12. Killed before LATEST, its checkpoint counts all the same."""
    faults = {FAULT_VARIABLE: f"{point}:kill:2:{rank}"}
    killed = start_txl(*command(dataset, tmp_path), environment=faults)
    output, _ = killed.communicate(timeout=240)
    assert f"rank {rank} was killed by SIGKILL" in output
    checkpoints = CheckpointDirectory(tmp_path)
    assert checkpoints.steps() == steps
    assert "step-00000006" in (tmp_path / "LATEST").read_text()
    for step in steps:
        verify_checkpoint(checkpoints.at(step))

    finished = txl(*command(dataset, tmp_path), timeout_seconds=240)
    assert finished.returncode == 0, finished.stderr
    assert f"resuming at step {steps[-1]} " in finished.stdout
    assert losses(tmp_path) == losses(straight)
    assert not saves_in_progress(checkpoints)


@pytest.mark.fault_row(6)
def test_a_second_request_during_a_save_ends_the_run_and_keeps_the_previous_checkpoint(
    dataset: Path, straight: Path, tmp_path: Path
) -> None:
    faults = {FAULT_VARIABLE: "save/manifest:sleep=300:2:0"}
    process = start_txl(*command(dataset, tmp_path), environment=faults)
    checkpoints = CheckpointDirectory(tmp_path)
    wait_until(
        lambda: checkpoints.steps() == [6] and saves_in_progress(checkpoints), timeout_seconds=180
    )
    process.send_signal(signal.SIGTERM)
    time.sleep(4)  # longer than what counts as a copy of the same request
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert checkpoints.steps() == [6]
    verify_checkpoint(checkpoints.at(6))

    finished = txl(*command(dataset, tmp_path), timeout_seconds=240)
    assert finished.returncode == 0, finished.stderr
    assert losses(tmp_path) == losses(straight)
