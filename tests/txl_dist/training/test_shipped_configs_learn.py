"""Every shipped config that trains on a CPU learns from the context: its loss falls clearly below
the unigram entropy of its data.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.streams.unigram_entropy import unigram_entropy
from tests.support.commands import start_txl, wait_until
from tests.support.training_runs import NO_EVALUATION, metrics
from txl_dist.config.starting_file import starting_file
from txl_dist.training.learning_check import CLEARLY_BELOW

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
ON_GPUS = ("paper", "nvidia", "wt103-")
"""Configs for which a CPU is too slow."""
INIT = "txl config init"
LONGER = {"tiny.yaml": ("training.num_steps=4000", "training.log_interval_steps=100")}
"""Its 20 steps of 15 tokens teach nothing."""


def shipped() -> list[object]:
    paths = (str(path.relative_to(CONFIGS)) for path in sorted(CONFIGS.rglob("*.yaml")))
    names = [INIT, *(name for name in paths if not any(part in name for part in ON_GPUS))]
    fast = ("cluster/first-run.yaml",)
    return [n if n in fast else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of `cluster/first-run.yaml`."""
    out = tmp_path_factory.mktemp("data") / "text"
    settings = PrepareSettings(split={"valid": 0.1})
    prepare_dataset([ROOT / "README.md", ROOT / "docs"], out, settings)
    return out


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    shutil.rmtree(tmp_path / "run")  # checkpoints


@pytest.mark.parametrize("name", shipped())
def test_its_loss_falls_clearly_below_the_unigram_entropy(
    name: str, text: Path, run: Path, tmp_path: Path
) -> None:
    path = CONFIGS / name
    if name == INIT:
        path = tmp_path / "mine.yaml"
        path.write_text(starting_file("mine"))
    manifest = load_manifest(text)
    entropy = unigram_entropy(
        [open_split(text, "train", manifest=manifest)], [1.0], vocab_size=manifest.vocab_size
    )

    def losses() -> list[float]:
        is_started = (run / "metrics.jsonl").exists()
        return [line["loss"] for line in metrics(run) if "loss" in line] if is_started else []

    settings = (f"data.path={text}", f"directory={run}", NO_EVALUATION, "tracking.enabled=false")
    words = ("train", path, "--on", "processes", "--ranks", "1", *settings, *LONGER.get(name, ()))
    with start_txl(*words) as process:
        try:
            wait_until(
                lambda: (
                    process.poll() is not None or min(losses(), default=9) < CLEARLY_BELOW * entropy
                ),
                timeout_seconds=3000,
                poll_seconds=0.2,
            )
        finally:
            process.kill()
    assert min(losses()) < CLEARLY_BELOW * entropy, losses()
