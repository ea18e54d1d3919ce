"""Configs of other programs: invalid or missing options are named."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.txl_dist.convert.example_files import hf_copy
from txl_dist.convert.architecture import read_json
from txl_dist.convert.transformers import read_transformers
from txl_dist.errors import CheckpointError, ConfigError


@pytest.mark.parametrize(
    "options",
    [
        {"n_head": 0},
        {"d_model": "32"},
        {"d_model": 31},
        {"d_model": 2**62},
        {"n_layer": 10**9},
        {"vocab_size": 0},
        {"cutoffs": [60, 20]},
        {"tie_projs": [True] * 9},
        {"clamp_len": 1.5},
        {"attn_type": 2},
        {"model_type": "gpt2"},
        {"layer_norm_epsilon": 0.1},
    ],
    ids=str,
)
def test_an_invalid_config(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="|".join([*options, "vocabulary", "no model can have"])):
        read_transformers(hf_copy(tmp_path / "hf", config=options))


@pytest.mark.parametrize("name", ["n_layer", "same_length", "untie_r", "tie_projs", "clamp_len"])
def test_an_option_that_is_missing_is_not_guessed(tmp_path: Path, name: str) -> None:
    source = hf_copy(tmp_path / "hf")
    options = json.loads((source / "config.json").read_text())
    del options[name]
    (source / "config.json").write_text(json.dumps(options))
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        read_transformers(source)


def test_a_huge_config_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(CheckpointError, match="not a config"):
        read_json(path)
