"""A signal during the evaluation after a checkpoint stops it immediately, without loss."""

import signal
from pathlib import Path

import pytest

from tests.support.commands import start_txl, txl, wait_until
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import TINY, metrics, tiny_spec, train
from txl_dist.checkpoint.directory import CheckpointDirectory

SETTINGS = (
    "training.checkpoint_interval_steps=10",
    "evaluation.batch_chunks=1",
    "evaluation.max_tokens=3000",
)


def scores(run: Path) -> dict[int, float]:
    return {line["step"]: line["valid/loss"] for line in metrics(run) if "valid/loss" in line}


@pytest.fixture(scope="module")
def straight(ranks: RankGroups, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run."""
    run = tmp_path_factory.mktemp("straight")
    assert ranks(2).run(train, tiny_spec(dataset, run, *SETTINGS)) == [0, 0]
    return run


@pytest.mark.fault_row(5)
@pytest.mark.fault
@pytest.mark.parametrize("step", [10, 20])
def test_sigterm_in_an_evaluation_ends_it_with_the_checkpoint_that_was_due(
    dataset: Path, straight: Path, tmp_path: Path, step: int
) -> None:
    run = tmp_path / "run"
    overrides = (f"data.path={dataset}", f"directory={run}", *SETTINGS)
    command = ("train", TINY, *overrides, "--on", "processes", "--ranks", 2)
    process = start_txl(*command)
    checkpoint = CheckpointDirectory(run).at(step)
    wait_until(checkpoint.is_dir)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert step not in scores(run)
    assert not (run / "evaluations" / f"step-{step:08d}.json").exists()

    finished = txl(*command)
    assert finished.returncode == 0, finished.stderr
    assert f"the evaluation of step {step}" in finished.stdout
    assert scores(run) == scores(straight)
    assert (run / "BEST").read_text() == (straight / "BEST").read_text()
