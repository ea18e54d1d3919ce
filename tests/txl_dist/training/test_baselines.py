"""The configs of the comparison: they differ in memory and positions, and all of them train."""

import math
import re
from itertools import combinations
from pathlib import Path

import pytest

from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import losses, train
from txl_dist.cli.reproduce import experiments
from txl_dist.config.config_file import flatten_config, load_run_config
from txl_dist.training.spec import TrainSpec

CONFIGS = Path(__file__).parents[3] / "configs"
BASELINES = sorted((CONFIGS / "baselines").glob("*.yaml"))


def test_the_baselines_differ_in_memory_and_positions_only() -> None:
    first, *others = [flatten_config(load_run_config(path)) for path in BASELINES]
    assert len(others) == 2
    keys = {key for other in others for key in first if other[key] != first[key]}
    assert keys == {"directory", "model.mem_len", "model.distance_encoding"}


def test_the_rows_of_the_ablation_are_the_experiments_of_the_table() -> None:
    readme = (CONFIGS / "baselines" / "README.md").read_text()
    rows = re.findall(r"\| `([a-z0-9-]+)` \|$", readme, re.MULTILINE)
    ablation = [name for name in experiments() if name.startswith(("wt103-128m", "lm1b-300m"))]
    assert rows == ablation
    models = [
        load_run_config(experiments()[name].config, experiments()[name].settings).model
        for name in rows
    ]
    assert all(one != other for one, other in combinations(models, 2))


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
    spec = TrainSpec(config=load_run_config(path, overrides))
    assert ranks(1).run(train, spec) == [0]
    nats = losses(tmp_path)
    assert nats[30] < nats[10] < math.log(257)
