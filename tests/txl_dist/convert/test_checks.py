"""Configs of other programs: invalid or missing options are named.

Tensors that do not fit the config are rejected by name, and code in a pickle never runs.
"""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_pipeline.system.files import sha256_file
from tests.support.hostile_pickle import Hostile
from tests.support.small_models import small_model
from tests.txl_dist.convert.example_files import golden_arrays, hf_copy, hf_weights
from txl_dist.convert.original_model import read_original, read_transformers
from txl_dist.convert.stored_model import load_exported, write_exported
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


REPORTED_NAME = "layers.1.dec_attn.qkv_net.weight"
NAME = f"transformer.{REPORTED_NAME}"


@pytest.mark.fault_row(23)
@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_a_pickle_with_code_is_rejected_before_it_runs(tmp_path: Path, writer: str) -> None:
    source, mark = hf_copy(tmp_path / "hf"), tmp_path / "mark"
    hostile = hf_weights() | {NAME: Hostile(mark)}
    if writer == "torch":
        torch.save(hostile, source / "pytorch_model.bin")
    else:
        (source / "pytorch_model.bin").write_bytes(pickle.dumps(hostile))
    with pytest.raises(CheckpointError, match="never run"):
        read_transformers(source)
    assert not mark.exists()
    pickle.loads(pickle.dumps(hostile[NAME]))
    assert mark.exists(), "the rejected code does run when it is unpickled"


Tensors = dict[str, Any]


def read_damaged_transformers(folder: Path, damage: Callable[[Tensors], Tensors]) -> None:
    source = hf_copy(folder / "hf")
    torch.save(damage(hf_weights()), source / "pytorch_model.bin")
    read_transformers(source)


def read_damaged_original(folder: Path, damage: Callable[[Tensors], Tensors]) -> None:
    arrays = golden_arrays("base_mem5")
    weights = {
        name: torch.from_numpy(arrays.pop(name)) for name in [*arrays] if name.startswith("sd/")
    }
    np.savez(folder / "bad.npz", **arrays, **damage(weights))
    read_original(folder / "bad.npz")


def read_damaged_export(folder: Path, damage: Callable[[Tensors], Tensors]) -> None:
    """Other weights with a matching hash: a wrong file, not a flipped bit."""
    write_exported(folder, small_model(), None)
    save_file(damage(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["weights_sha256"] = sha256_file(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    load_exported(folder)


FORMATS = {
    "transformers": (read_damaged_transformers, "transformer.", REPORTED_NAME),
    "original": (read_damaged_original, "sd/", REPORTED_NAME),
    "export": (read_damaged_export, "", "layers.1.feed_forward.up.weight"),
}
"""By format: its reader, the prefix of its names, and a weight as errors name it."""
DAMAGES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "NaN": (lambda x: torch.full_like(x, torch.nan), "{} is NaN or Inf in"),
    "one infinity": (lambda x: x.index_fill(0, torch.tensor([3]), torch.inf), "{} is NaN or Inf"),
    "another shape": (lambda x: x[:-1].clone(), "{} has shape"),
    "integers": (lambda x: x.long(), "{} is .*int64"),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_bad_weight_is_named_in_every_format(tmp_path: Path, kind: str, name: str) -> None:
    read, prefix, weight = FORMATS[name]
    damage, message = DAMAGES[kind]
    if (kind, name) == ("integers", "original"):
        message = "{} is array"  # only floats of an .npz become tensors
    with pytest.raises(CheckpointError, match=message.format(weight)):
        read(tmp_path, lambda x: x | {prefix + weight: damage(x[prefix + weight])})


@pytest.mark.parametrize("name", FORMATS)
def test_a_missing_or_unknown_weight_is_named_in_every_format(tmp_path: Path, name: str) -> None:
    read, prefix, weight = FORMATS[name]

    def exchange(tensors: Tensors) -> Tensors:
        kept = {each: x for each, x in tensors.items() if each != prefix + weight}
        return kept | {f"{prefix}layers.3.ghost": torch.zeros(2)}

    with pytest.raises(CheckpointError, match=rf"misses {weight} and has .*unknown.*3\.ghost"):
        read(tmp_path, exchange)


@pytest.mark.parametrize("name", ["crit.ghost", "bert.ghost"])
def test_an_unknown_weight_of_another_part(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="ghost"):
        read_damaged_transformers(tmp_path, lambda x: x | {name: torch.zeros(2)})


@pytest.mark.parametrize(
    "weight", [torch.zeros(96, 32).to_sparse(), "text"], ids=["sparse", "text"]
)
def test_a_weight_that_is_no_dense_tensor(tmp_path: Path, weight: object) -> None:
    with pytest.raises(CheckpointError, match=REPORTED_NAME):
        read_damaged_transformers(tmp_path, lambda x: x | {NAME: weight})


def test_tied_weights_that_differ(tmp_path: Path) -> None:
    name = "crit.out_layers.1.weight"
    with pytest.raises(CheckpointError, match=r"out_layers.1.weight differs from"):
        read_damaged_transformers(tmp_path, lambda x: x | {name: x[name] + 1})


def test_an_absurd_size_is_rejected_before_it_takes_memory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="shape"):
        read_transformers(hf_copy(tmp_path / "hf", config={"d_inner": 10**12}))
