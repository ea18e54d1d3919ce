"""Promise 4: a checkpoint resumes on any number of ranks, any ZeRO stage and micro-batch size."""

from pathlib import Path

import pytest

from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import DROPOUT, NO_EVALUATION, ZERO, losses, tiny_job, train

# As in test_one_trajectory.py: another number of ranks sums floats in another order.
TOLERANCE = 2e-6
SETTINGS = (NO_EVALUATION, *DROPOUT, "training.checkpoint_interval_steps=4")


@pytest.mark.fault_row(27)
def test_a_run_moved_between_ranks_and_stages_keeps_its_losses(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    # Each leg is stopped by num_steps; the schedule must not notice, so it is constant here.
    legs = [
        (2, 4, ZERO["3-all-spread"]),
        (1, 8, (*ZERO["1"], "training.micro_batch_lanes=2")),
        (2, 12, ZERO["3"]),
        (1, 15, (*ZERO["3-all-spread"], "training.micro_batch_lanes=2")),
        (2, 17, ZERO["2"]),
        (1, 20, (*ZERO["0"], "training.micro_batch_lanes=1")),
    ]
    constant = (*SETTINGS, "optimizer.schedule=constant")
    reference = tmp_path / "reference"
    assert ranks(2).run(train, tiny_job(dataset, reference, *constant)) == [0, 0]

    moved = tmp_path / "moved"
    for num_ranks, num_steps, overrides in legs:
        job = tiny_job(
            dataset,
            moved,
            *constant,
            f"training.num_steps={num_steps}",
            *overrides,
            allow_change=("training.num_steps",),
        )
        assert ranks(num_ranks).run(train, job) == [0] * num_ranks

    assert losses(moved) == pytest.approx(losses(reference), rel=TOLERANCE)
    assert len(losses(moved)) == 20


@pytest.mark.parametrize("stage", ZERO)
def test_a_resume_at_the_same_world_size_is_bit_for_bit(
    ranks: RankGroups, dataset: Path, tmp_path: Path, stage: str
) -> None:
    settings = (*SETTINGS, *ZERO[stage], "training.keep_checkpoints=9")
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert ranks(2).run(train, tiny_job(dataset, straight, *settings)) == [0, 0]

    checkpoint = straight / "checkpoints" / "step-00000008"
    job = tiny_job(dataset, resumed, *settings, resume=str(checkpoint))
    assert ranks(2).run(train, job) == [0, 0]

    expected = {step: loss for step, loss in losses(straight).items() if step > 8}
    assert losses(resumed) == expected


def test_the_interval_of_step_lines_survives_a_resume(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    """A line over steps 6 to 10 is the same if the run was resumed after step 8."""
    settings = (*SETTINGS, "training.log_interval_steps=5", "training.keep_checkpoints=9")
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert ranks(1).run(train, tiny_job(dataset, straight, *settings)) == [0]
    checkpoint = straight / "checkpoints" / "step-00000008"
    job = tiny_job(dataset, resumed, *settings, resume=str(checkpoint))
    assert ranks(1).run(train, job) == [0]

    assert losses(resumed) == {step: losses(straight)[step] for step in (10, 15, 20)}
