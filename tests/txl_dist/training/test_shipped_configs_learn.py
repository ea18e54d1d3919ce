"""Every shipped config that trains on a CPU learns from the context: its loss falls clearly below
the unigram entropy of its data. The configs of the comparison differ in memory and positions.
"""

import re
import sysconfig
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import PrepareSettings, load_manifest
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.streams.segments import read_range
from tests.support.commands import start_txl, wait_until
from tests.support.training_runs import NO_EVALUATION, metrics
from txl_dist.cli.reproduce import experiments
from txl_dist.config.config_file import flatten_config, load_run_config
from txl_dist.config.starting_file import starting_file

CLEARLY_BELOW = 0.92
"""The parts of a text differ by a few percent: a run that learned nothing ended at 0.95."""
ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
ELSEWHERE = ("paper", "nvidia", "wt103-", "tiny", "30m", "125m", "350m", "64-gpus")
"""A CPU is too slow for them; tiny.yaml has 15 tokens per step."""
INIT = "txl config init"


def shipped() -> list[object]:
    paths = (str(path.relative_to(CONFIGS)) for path in sorted(CONFIGS.rglob("*.yaml")))
    names = [INIT, *(name for name in paths if not any(part in name for part in ELSEWHERE))]
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def prepare_data(name: str, folder: Path) -> Path:
    """Data like that of the config: modules of the standard library, or the documents of txl."""
    library = Path(sysconfig.get_paths()["stdlib"])
    is_code = name.startswith(("baselines", "quickstart", "modern"))
    inputs = sorted(library.glob("*.py")) if is_code else [ROOT / "README.md", ROOT / "docs"]
    prepare_dataset(inputs, folder, PrepareSettings(split={"valid": 0.1}), max_reject_rate=0.02)
    return folder


@pytest.mark.parametrize("name", shipped())
def test_its_loss_falls_clearly_below_the_unigram_entropy(name: str, tmp_path: Path) -> None:
    path, run, text = CONFIGS / name, tmp_path / "run", prepare_data(name, tmp_path / "data")
    manifest = load_manifest(text)
    if name == INIT:
        path = tmp_path / "mine.yaml"
        path.write_text(starting_file("mine", manifest=manifest))
    source = open_split(text, "train", manifest=manifest)
    tokens, _ = read_range(source, 0, source.num_tokens)
    share_V = np.bincount(tokens) / len(tokens)
    entropy = -(share_V * np.log(share_V, where=share_V > 0, out=np.zeros_like(share_V))).sum()

    def learns() -> bool:
        lines = metrics(run) if (run / "metrics.jsonl").exists() else []
        return any(line.get("loss", entropy) < CLEARLY_BELOW * entropy for line in lines)

    settings = (f"data.path={text}", f"directory={run}", NO_EVALUATION, "tracking.enabled=false")
    words = ("train", path, "--on", "processes", "--ranks", "1", *settings)
    with start_txl(*words) as process:
        try:
            wait_until(lambda: learns() or process.poll() is not None, timeout_seconds=3000)
        finally:
            process.kill()
    assert learns()


# --- the baselines --------------------------------------------------------------------------------


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
