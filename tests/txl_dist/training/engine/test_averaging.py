"""The average of the weights is their average, computed by hand from checkpoints of every step."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.diverging_runs import SkipSteps, train_with
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, ZERO, tiny_job
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.reader import load_model

NUM_STEPS, START, DECAY, SKIPPED = 9, 3, 0.7, 5
SETTINGS = (
    NO_EVALUATION, f"training.num_steps={NUM_STEPS}", "training.checkpoint_interval_steps=1",
    "training.keep_checkpoints=99", f"optimizer.averaging_start_step={START}",
)  # fmt: skip


def weights(run: Path, step: int, which: str) -> dict[str, Tensor]:
    path = CheckpointDirectory(run).at(step)
    model, *_ = load_model(path, weights=which)  # type: ignore[arg-type]
    return {name: parameter.detach().double() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("averaging", "num_ranks", "stage"),
    [
        ("ema", 1, "0"),
        ("asgd", 2, "2"),
        pytest.param("ema", 2, "3-all-spread", marks=pytest.mark.slow),
    ],
)
def test_an_average_is_the_mean_of_the_weights_after_each_update(
    ranks: RankGroups, dataset: Path, tmp_path: Path, averaging: str, num_ranks: int, stage: str
) -> None:
    """A skipped step is no update: it has no weight in the average."""
    options = (f"optimizer.averaging={averaging}", *ZERO[stage])
    options += (f"optimizer.ema_decay={DECAY}",) if averaging == "ema" else ()
    job = tiny_job(dataset, tmp_path, *SETTINGS, *options)
    ends = ranks(num_ranks).run(train_with, job, SkipSteps(SKIPPED))
    assert [code for code, *_ in ends] == [0] * num_ranks
    updates = [weights(tmp_path, n, "last") for n in range(1, NUM_STEPS + 1) if n != SKIPPED]
    for name, average in weights(tmp_path, NUM_STEPS, "averaged").items():
        counted = [of_step[name] for of_step in updates[START - 1 :]]
        expected = torch.stack(counted).mean(0)
        if averaging == "ema":
            expected = counted[0]
            for weight in counted[1:]:
                expected = DECAY * expected + (1 - DECAY) * weight
        torch.testing.assert_close(average, expected, rtol=1e-5, atol=1e-6)
    changed = [not torch.equal(updates[-1][name], updates[START][name]) for name in updates[0]]
    assert all(changed), "else an average would be equal to the weights"
