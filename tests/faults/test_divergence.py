"""A NaN on one of two ranks and a loss spike end a run that shall neither skip nor roll back.

tests/txl_dist/training/test_recovery.py tests the other policies.
"""

from pathlib import Path

import pytest

from tests.support.diverging_runs import Fault, HighRate, NanWeight, train_with
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, losses, tiny_spec

SETTINGS = (NO_EVALUATION, "training.num_steps=16", "training.checkpoint_interval_steps=4")
SPIKES = ("divergence.loss_spike=10", "divergence.window_steps=6")


@pytest.mark.fault_row(28, 29)
@pytest.mark.fault
@pytest.mark.parametrize("fault", [NanWeight(rank=1, step=10), HighRate(9)], ids=["nan", "spike"])
def test_stop_ends_the_run_at_the_event(
    ranks: RankGroups, dataset: Path, tmp_path: Path, fault: Fault
) -> None:
    """Both are seen in the loss of step 10."""
    spec = tiny_spec(dataset, tmp_path, *SETTINGS, *SPIKES)
    for code, message, _ in ranks(2).run(train_with, spec, fault):
        assert code == 5
        assert "the loss of step 10 is " in message
        assert "no rank has changed its weights" in message
        assert str(tmp_path / "events" / "divergence-step-00000010-rank-*.json") in message
    assert max(losses(tmp_path)) == 9
    assert len([*(tmp_path / "events").iterdir()]) == 2
