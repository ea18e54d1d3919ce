"""What is not the model it says it is: refused by name, and never run."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from data_pipeline.storage.atomic_files import sha256_file
from tests.support.hostile_pickle import Hostile
from tests.support.small_models import small_model
from tests.txl_dist.convert.example_files import golden_arrays, hf_copy, hf_weights
from txl_dist.convert.formats import read_model
from txl_dist.convert.original import read_original
from txl_dist.convert.single_file import load_exported, write_exported
from txl_dist.convert.transformers import read_transformers
from txl_dist.errors import CheckpointError, ConfigError

TOLD = "layers.1.dec_attn.qkv_net.weight"
NAME = f"transformer.{TOLD}"


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_a_hostile_pickle_is_refused_unrun(tmp_path: Path, writer: str) -> None:
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
    assert mark.exists(), "what was refused does run where pickles do"


def test_hostile_arrays_are_refused_unrun(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    hostile = np.array([Hostile(mark)], dtype=object)
    np.savez(tmp_path / "bad.npz", **(golden_arrays("base_mem5") | {"sd/r_w_bias": hostile}))
    with pytest.raises(CheckpointError, match="plain arrays"):
        read_original(tmp_path / "bad.npz")
    assert not mark.exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite(tmp_path: Path, value: float) -> None:
    spoiled = hf_weights()
    spoiled[NAME][3, 4] = value
    expect_refusal(tmp_path, spoiled, match=f"{TOLD} is not finite in 1 of")


def test_a_missing_weight(tmp_path: Path) -> None:
    spoiled = hf_weights()
    del spoiled[NAME]
    expect_refusal(tmp_path, spoiled, match=f"misses {TOLD}")


@pytest.mark.parametrize("name", ["transformer.layers.3.ghost", "crit.ghost", "bert.ghost"])
def test_a_foreign_weight(tmp_path: Path, name: str) -> None:
    expect_refusal(tmp_path, hf_weights() | {name: torch.zeros(2)}, match="ghost")


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(96, 31), torch.zeros(96, 32).long(), torch.zeros(96, 32).to_sparse(), "text"],
    ids=["shape", "integers", "sparse", "text"],
)
def test_a_weight_of_another_kind(tmp_path: Path, tensor: object) -> None:
    expect_refusal(tmp_path, hf_weights() | {NAME: tensor}, match=TOLD)


def test_tied_weights_that_differ(tmp_path: Path) -> None:
    spoiled = hf_weights()
    spoiled["crit.out_layers.1.weight"] = spoiled["crit.out_layers.1.weight"] + 1
    expect_refusal(tmp_path, spoiled, match=r"out_layers.1.weight differs from")


def expect_refusal(tmp_path: Path, weights: dict[str, Any], *, match: str) -> None:
    source = hf_copy(tmp_path / "hf")
    torch.save(weights, source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=match):
        read_transformers(source)


SPOILED = {
    "not finite": (lambda tensor: torch.full_like(tensor, torch.nan), "{} is not finite"),
    "missing": (lambda tensor: None, "misses {}"),
    "of another shape": (lambda tensor: tensor[:-1].clone(), "{} has shape"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_bad_weight_of_the_original_is_named(tmp_path: Path, how: str) -> None:
    spoil, message = SPOILED[how]
    arrays = golden_arrays("base_mem5")
    name = "layers.1.pos_ff.CoreNet.0.weight"
    spoiled = spoil(torch.from_numpy(arrays.pop(f"sd/{name}")))
    if spoiled is not None:
        arrays[f"sd/{name}"] = spoiled.numpy()
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(CheckpointError, match=message.format(name)):
        read_original(tmp_path / "bad.npz")


@pytest.mark.parametrize("how", SPOILED)
def test_a_bad_weight_of_an_export_is_named(tmp_path: Path, how: str) -> None:
    spoil, message = SPOILED[how]
    name = "layers.1.feed_forward.up.weight"
    weights = exported_weights(tmp_path)
    spoiled = spoil(weights.pop(name))
    rewrite_export(tmp_path, weights if spoiled is None else weights | {name: spoiled})
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
    """Other weights, with the hash that belongs to them: someone's mistake, not a flipped bit."""
    save_file(weights, out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    config["weights_sha256"] = sha256_file(out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 cut off", b"\x80\x04\x95 cut off", b"text"])
def test_damaged_files(tmp_path: Path, data: bytes) -> None:
    source = hf_copy(tmp_path / "hf")
    (tmp_path / "bad.npz").write_bytes(data)
    (source / "pytorch_model.bin").write_bytes(data)
    for path in (source, tmp_path / "bad.npz"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_model(path)
    (source / "config.json").write_bytes(data)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_model(source)


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
def test_an_impossible_config(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="|".join([*options, "vocabulary", "no model can have"])):
        read_transformers(hf_copy(tmp_path / "hf", config=options))


def test_an_absurd_size_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="shape"):
        read_transformers(hf_copy(tmp_path / "hf", config={"d_inner": 10**12}))


@pytest.mark.parametrize("name", ["n_layer", "same_length", "untie_r", "tie_projs", "clamp_len"])
def test_an_option_that_is_missing_is_not_guessed(tmp_path: Path, name: str) -> None:
    source = hf_copy(tmp_path / "hf")
    given = json.loads((source / "config.json").read_text())
    del given[name]
    (source / "config.json").write_text(json.dumps(given))
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        read_transformers(source)


def test_a_state_dict_without_its_config(tmp_path: Path) -> None:
    arrays = golden_arrays("base_mem5")
    del arrays["config_json"]
    np.savez(tmp_path / "bare.npz", **arrays)
    with pytest.raises(ConfigError, match=r"bare\.json"):
        read_original(tmp_path / "bare.npz")
