"""The headers of configs/modern have the numbers of `txl estimate`."""

import json
import re
from pathlib import Path

import pytest

from tests.support.commands import txl
from txl_dist.config.config_file import load_run_config
from txl_dist.model.choices import RECIPES

LARGE = ("30m", "125m", "350m")
CONFIGS = sorted((Path(__file__).parents[3] / "configs/modern").glob("*.yaml"))


@pytest.mark.parametrize(
    "path",
    [
        # All but the quickstart take 10 s each.
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in LARGE))
        for path in CONFIGS
    ],
)
def test_a_header_has_the_numbers_of_the_estimate(path: Path) -> None:
    header = " ".join(
        line.lstrip("# ") for line in path.read_text().split("\ndirectory:")[0].split("\n")
    )
    command = re.search(r"\(txl (estimate \S+ model\.vocab_size=\d+ --gpus \d)\)", header)
    assert command, header
    words = [*command[1].split(), "training.compile=false", "--json"]
    words[1] = str(path)
    estimate, twin = (json.loads(txl(*words, *more).stdout) for more in ((), ("model.mem_len=0",)))
    memory = estimate["stages"]["1"]
    saved = 1 - twin["flops_per_token"] / estimate["flops_per_token"]
    for text in (
        f"{estimate['num_parameters']:,} parameters",
        f"{estimate['flops_per_token']:.2e} FLOPs per token, forward and backward",
        f"{_size(memory['device'])} at ZeRO stage 1, {_size(memory['lanes'])} of it for",
        f"a checkpoint has {_size(estimate['checkpoint_bytes'])}",
        f"{twin['flops_per_token']:.2e} FLOPs per token, {saved:.0%} fewer",
    ):
        assert text in header


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_of_the_recipe(path: Path) -> None:
    model = load_run_config(path).model
    for name, value in RECIPES["modern"].items():
        assert getattr(model, name) == value


def _size(num_bytes: int) -> str:
    if num_bytes > 2**29:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.0f} MiB"
