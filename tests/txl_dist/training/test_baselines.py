"""The configs of the comparison: they differ in memory and positions, and all of them train."""

import math
from pathlib import Path

import pytest

from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import losses, train
from txl_dist.config.config_file import flatten_config, load_run_config
from txl_dist.training.job import TrainJob

CONFIGS = Path(__file__).parents[3] / "configs"
BASELINES = sorted((CONFIGS / "baselines").glob("*.yaml"))
WT103 = CONFIGS / "paper" / "wt103-base.yaml"
ABLATION = {
    "recurrence, Shaw": ("model.distance_encoding=shaw", "model.clamp_len=299"),
    "no recurrence": ("model.mem_len=0",),
    "no recurrence, Shaw": (
        "model.mem_len=0",
        "model.distance_encoding=shaw",
        "model.clamp_len=149",
    ),
    "vanilla": ("model.mem_len=0", "model.distance_encoding=absolute"),
}
"""The table of configs/baselines/README.md."""


def test_the_baselines_differ_in_memory_and_positions_only() -> None:
    first, *others = [flatten_config(load_run_config(path)) for path in BASELINES]
    assert len(others) == 2
    keys = {key for other in others for key in first if other[key] != first[key]}
    assert keys == {"directory", "model.mem_len", "model.distance_encoding"}


@pytest.mark.parametrize("row", ABLATION)
def test_the_rows_of_the_ablation_are_valid_and_in_the_table(row: str) -> None:
    config = load_run_config(WT103, ABLATION[row])
    assert config.model != load_run_config(WT103).model
    readme = (CONFIGS / "baselines" / "README.md").read_text()
    assert f"| `{' '.join(ABLATION[row])}` |" in readme


@pytest.mark.slow
@pytest.mark.parametrize("path", BASELINES, ids=lambda path: path.stem)
def test_every_baseline_trains(
    ranks: RankGroups, dataset: Path, tmp_path: Path, path: Path
) -> None:
    overrides = (
        f"data.path={dataset}",
        f"directory={tmp_path}",
        "data.num_lanes=2",
        "training.num_steps=30",
        "training.log_interval_steps=10",
        "optimizer.warmup_steps=0",
        "evaluation.max_tokens=500",
    )
    job = TrainJob(config=load_run_config(path, overrides))
    assert ranks(1).run(train, job) == [0]
    nats = losses(tmp_path)
    assert nats[30] < nats[10] < math.log(257)
