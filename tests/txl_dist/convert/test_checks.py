"""Configs of other programs: invalid or missing options are named.

Tensors that do not fit the config are rejected by name, and code in a pickle never runs.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from data_pipeline.system.files import sha256_file
from tests.support.hostile_pickle import Hostile
from tests.support.small_models import small_model
from tests.txl_dist.convert.example_files import golden_arrays, hf_copy, hf_weights
from txl_dist.convert.other_programs import read_original, read_transformers
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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite(tmp_path: Path, value: float) -> None:
    damaged = hf_weights()
    damaged[NAME][3, 4] = value
    expect_rejection(tmp_path, damaged, match=f"{REPORTED_NAME} is NaN or Inf in 1 of")


def test_a_missing_weight(tmp_path: Path) -> None:
    damaged = hf_weights()
    del damaged[NAME]
    expect_rejection(tmp_path, damaged, match=f"misses {REPORTED_NAME}")


@pytest.mark.parametrize("name", ["transformer.layers.3.ghost", "crit.ghost", "bert.ghost"])
def test_an_unknown_weight(tmp_path: Path, name: str) -> None:
    expect_rejection(tmp_path, hf_weights() | {name: torch.zeros(2)}, match="ghost")


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(96, 31), torch.zeros(96, 32).long(), torch.zeros(96, 32).to_sparse(), "text"],
    ids=["shape", "integers", "sparse", "text"],
)
def test_a_weight_of_the_wrong_kind(tmp_path: Path, tensor: object) -> None:
    expect_rejection(tmp_path, hf_weights() | {NAME: tensor}, match=REPORTED_NAME)


def test_tied_weights_that_differ(tmp_path: Path) -> None:
    damaged = hf_weights()
    damaged["crit.out_layers.1.weight"] = damaged["crit.out_layers.1.weight"] + 1
    expect_rejection(tmp_path, damaged, match=r"out_layers.1.weight differs from")


def expect_rejection(tmp_path: Path, weights: dict[str, Any], *, match: str) -> None:
    source = hf_copy(tmp_path / "hf")
    torch.save(weights, source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=match):
        read_transformers(source)


DAMAGES = {
    "not finite": (lambda tensor: torch.full_like(tensor, torch.nan), "{} is NaN or Inf"),
    "missing": (lambda tensor: None, "misses {}"),
    "of the wrong shape": (lambda tensor: tensor[:-1].clone(), "{} has shape"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_bad_weight_of_the_original_is_named(tmp_path: Path, kind: str) -> None:
    damage, message = DAMAGES[kind]
    arrays = golden_arrays("base_mem5")
    name = "layers.1.pos_ff.CoreNet.0.weight"
    damaged = damage(torch.from_numpy(arrays.pop(f"sd/{name}")))
    if damaged is not None:
        arrays[f"sd/{name}"] = damaged.numpy()
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(CheckpointError, match=message.format(name)):
        read_original(tmp_path / "bad.npz")


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_bad_weight_of_an_export_is_named(tmp_path: Path, kind: str) -> None:
    damage, message = DAMAGES[kind]
    name = "layers.1.feed_forward.up.weight"
    weights = exported_weights(tmp_path)
    damaged = damage(weights.pop(name))
    rewrite_export(tmp_path, weights if damaged is None else weights | {name: damaged})
    with pytest.raises(CheckpointError, match=message.format(name)):
        load_exported(tmp_path)


def test_an_unknown_weight_is_named_in_every_format(tmp_path: Path) -> None:
    ghost = {"sd/layers.3.ghost": np.zeros(2, np.float32)}
    np.savez(tmp_path / "bad.npz", **(golden_arrays("base_mem5") | ghost))
    with pytest.raises(CheckpointError, match=r"unknown.*layers\.3\.ghost"):
        read_original(tmp_path / "bad.npz")
    weights = exported_weights(tmp_path / "out")
    rewrite_export(tmp_path / "out", weights | {"layers.3.ghost": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"unknown.*layers\.3\.ghost"):
        load_exported(tmp_path / "out")


def exported_weights(out: Path) -> dict[str, torch.Tensor]:
    write_exported(out, small_model(), None)
    return load_file(out / "model.safetensors")


def rewrite_export(out: Path, weights: dict[str, torch.Tensor]) -> None:
    """Other weights with a matching hash: a wrong file, not a flipped bit."""
    save_file(weights, out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    config["weights_sha256"] = sha256_file(out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config))


def test_an_absurd_size_is_rejected_before_it_takes_memory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="shape"):
        read_transformers(hf_copy(tmp_path / "hf", config={"d_inner": 10**12}))
