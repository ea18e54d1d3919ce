"""Two commands with one PATH are the same if their settings had the same effect until now."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.training_runs import tiny_job
from txl_dist.training.data import TrainingData
from txl_dist.training.given_checkpoint import changed_settings, named_checkpoint
from txl_dist.training.state import GivenCheckpoint, Phase

CHANGES = "training.changes=[{step: 8, num_lanes: 4}, {step: 12, num_lanes: 6}]"


def command(dataset: Path, *overrides: str) -> GivenCheckpoint:
    """After it was stored in a checkpoint."""
    job = tiny_job(dataset, Path("run"), *overrides, resume="other/checkpoints/step-00000003")
    named = named_checkpoint(job, TrainingData.open(job.config, num_ranks=1))
    return GivenCheckpoint.model_validate_json(named.model_dump_json())


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        ((), []),
        (("training.num_steps=99", "training.log_interval_steps=7", "directory=x"), []),
        (("optimizer.lr=0.5", "model.dropout=0.3"), ["model.dropout", "optimizer.lr"]),
        ((CHANGES.replace("12", "11"),), []),
        ((CHANGES.replace("8", "9"),), ["training.changes"]),
        ((CHANGES.replace("4", "3"),), ["training.changes"]),
        (("training.changes=[]",), ["training.changes"]),
    ],
)
def test_a_setting_counts_if_it_has_changed_the_trajectory_until_step_10(
    dataset: Path, overrides: tuple[str, ...], changed: list[str]
) -> None:
    before, now = command(dataset, CHANGES), command(dataset, CHANGES, *overrides)
    assert changed_settings(before, now, step=10) == changed
    assert before.path == now.path == str(Path("other/checkpoints/step-00000003").absolute())


@pytest.mark.parametrize(
    ("digest", "weight", "same"), [("a", 2, True), ("a", 3, False), ("b", 2, False)]
)
def test_other_data_and_other_shares_are_another_command(
    digest: str, weight: float, same: bool
) -> None:
    def mixture(digest: str, *weights: float) -> GivenCheckpoint:
        entries = ({"name": f"corpus {w}", "digest": digest * 64, "tokens": 5} for w in range(2))
        corpora = [entry | {"weight": w} for entry, w in zip(entries, weights, strict=True)]
        data: Any = SimpleNamespace(phase=Phase.model_validate({"corpora": tuple(corpora)}))
        return named_checkpoint(tiny_job(Path("x"), Path("run"), resume="other"), data)

    changed = changed_settings(mixture("a", 1.0, 1.0), mixture(digest, 2.0, float(weight)), step=10)
    assert changed == ([] if same else ["data"])
