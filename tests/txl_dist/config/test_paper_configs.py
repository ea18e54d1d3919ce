"""The configs of the paper's experiments have the published settings, every one of them.

Source: the scripts of the paper's code, as the table of published configurations lists them.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from txl_dist.config.config_file import load_run_config
from txl_dist.config.run_config import RunConfig
from txl_dist.reproduction.experiments import EXPERIMENTS

CONFIGS = Path(__file__).parents[3] / "configs"


class Published(NamedTuple):
    """One row."""

    n_layer: int
    d_model: int
    n_head: int
    d_head: int
    d_inner: int
    dropout: float
    dropatt: float
    warmup_steps: int
    num_steps: int
    tgt_len: int
    mem_len: int
    num_lanes: int
    evaluation: tuple[int, int, int | None]
    """tgt_len, mem_len, clamp_len."""
    cutoffs: tuple[int, ...] = ()
    div_val: int = 1


WT103, LM1B = (20_000, 40_000, 200_000), (60_000, 100_000, 640_000)
ENWIK8_BASE = Published(12, 512, 8, 64, 2048, 0.1, 0.0, 0, 400_000, 512, 512, 22, (80, 2100, 820))
ENWIK8_LARGE = Published(
    24, 1024, 8, 128, 3072, 0.15, 0.15, 4_000, 400_000, 768, 768, 64, (128, 3800, 1000)
)
TABLE = {
    "wt103-base": Published(
        16, 410, 10, 41, 2100, 0.1, 0.0, 0, 200_000, 150, 150, 60, (64, 640, 400), WT103
    ),
    "wt103-large": Published(
        18, 1024, 16, 64, 4096, 0.2, 0.2, 16_000, 4_000_000, 384, 384, 128, (128, 1600, 1000),
        WT103, 4,
    ),
    "enwik8-base": ENWIK8_BASE,
    "enwik8-large": ENWIK8_LARGE,
    "text8-base": ENWIK8_BASE,
    "text8-large": ENWIK8_LARGE,
    "lm1b-base": Published(
        18, 1024, 8, 128, 4096, 0.0, 0.0, 20_000, 500_000, 32, 32, 224, (32, 128, None), LM1B, 4
    ),
    "lm1b-large": Published(
        24, 1280, 16, 80, 8192, 0.05, 0.05, 30_000, 1_200_000, 32, 32, 512, (32, 128, None), LM1B, 4
    ),
}  # fmt: skip


def settings_of(config: RunConfig, evaluation: tuple[int, int, int | None]) -> Published:
    model, data = config.model, config.data
    return Published(
        model.n_layer, model.d_model, model.n_head, model.d_head, model.d_inner, model.dropout,
        model.dropatt, config.optimizer.warmup_steps, config.num_steps, data.tgt_len,
        model.mem_len, data.num_lanes, evaluation, model.cutoffs, model.div_val,
    )  # fmt: skip


def test_every_experiment_has_a_row_and_a_config() -> None:
    files = {path.stem for path in (CONFIGS / "paper").glob("*.yaml")}
    assert files == set(TABLE) == set(EXPERIMENTS)


@pytest.mark.parametrize("name", TABLE)
def test_the_settings_are_the_published_ones(name: str) -> None:
    config, experiment = load_run_config(CONFIGS / "paper" / f"{name}.yaml"), EXPERIMENTS[name]
    lengths = (experiment.tgt_len, experiment.mem_len, experiment.clamp_len)
    assert settings_of(config, lengths) == TABLE[name]
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.schedule, optimizer.min_lr) == (2.5e-4, "cosine", 0.0)
    assert optimizer.schedule_of_paper_code
    assert optimizer.gradient_clipping == 0.25
    assert optimizer.weight_decay == 0
    assert optimizer.name in ("adam", "adamw"), "equal without weight decay"
    assert config.data.reset == "stream"
    assert config.model.tie_weight
    assert not config.model.untie_r


def test_nvidia_s_variant() -> None:
    config = load_run_config(CONFIGS / "nvidia" / "wt103-base.yaml")
    lengths = (64, 640, 400)
    assert settings_of(config, lengths) == Published(
        16, 512, 8, 64, 2048, 0.1, 0.0, 1_000, 40_000, 192, 192, 256, lengths,
        (19_997, 39_997, 199_997),
    )  # fmt: skip
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.min_lr) == ("lamb", 0.01, 0.001)
    assert (optimizer.schedule, optimizer.gradient_clipping) == ("cosine", 0.25)
