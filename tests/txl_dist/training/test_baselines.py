"""The configs of the comparison differ in memory and positions.

That all of them train is tested in test_shipped_configs_learn.py.
"""

import re
from itertools import combinations
from pathlib import Path

from txl_dist.cli.reproduce import experiments
from txl_dist.config.config_file import flatten_config, load_run_config

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
