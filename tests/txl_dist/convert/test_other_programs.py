"""Damaged files of every format are rejected.

A model imported from the paper's code computes what that code computes.

A model imported from transformers computes what transformers computes.
"""

import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from tests.support.hostile_pickle import Hostile
from tests.support.replayed_models import (
    OWN_GOLDEN,
    golden_files,
    hf_directories,
    num_segments,
    original_arguments,
    read_arrays,
)
from tests.txl_dist.convert.example_files import golden_arrays, hf_copy, nats_of
from txl_dist.convert.original_model import read_model, read_original, read_transformers
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.model.transformer_xl import TransformerXL


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


FILES = {path.stem: path for path in golden_files()}
SUPPORTED = [
    name for name, path in FILES.items() if original_arguments(path).get("attn_type", 0) == 0
]


# With ext_len, segments repeat the end of the last one: tests/txl_dist/model/test_golden.py.
CONTIGUOUS = [name for name in SUPPORTED if not original_arguments(FILES[name]).get("ext_len")]


@pytest.mark.parametrize("name", CONTIGUOUS)
def test_state_dict_of_the_original(name: str) -> None:
    arrays = read_arrays(FILES[name])
    segments = [
        (torch.from_numpy(arrays[f"input/{k}"]).t(), torch.from_numpy(arrays[f"target/{k}"]).t())
        for k in range(num_segments(arrays))
    ]
    nats = nats_of(read_original(FILES[name]).double(), segments)
    for k, nats_BT in enumerate(nats):
        assert_close(nats_BT, torch.from_numpy(arrays[f"nll/{k}"]).t(), rtol=0, atol=1e-10)


def test_every_other_attention_of_the_original_is_rejected() -> None:
    for name in FILES.keys() - set(SUPPORTED):
        with pytest.raises(ConfigError, match="attn_type"):
            read_original(FILES[name])


def test_the_repository_has_both_kinds_of_the_originals_attention() -> None:
    kinds = [original_arguments(path)["attn_type"] for path in OWN_GOLDEN.glob("*.npz")]
    assert kinds.count(0) >= 10
    assert {1, 2} <= set(kinds)


def test_names_without_prefix(tmp_path: Path) -> None:
    arrays = golden_arrays("adapt_div2_tied_tieproj")
    plain = {"config_json": arrays["config_json"]}
    plain |= {name.removeprefix("sd/"): a for name, a in arrays.items() if name.startswith("sd/")}
    np.savez(tmp_path / "plain.npz", **plain)
    expected = read_original(OWN_GOLDEN / "adapt_div2_tied_tieproj.npz")
    loaded = read_original(tmp_path / "plain.npz")
    assert loaded.config == expected.config
    for name, weight in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


@pytest.mark.fault_row(23)
def test_arrays_with_code_are_rejected_before_it_runs(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    hostile = np.array([Hostile(mark)], dtype=object)
    np.savez(tmp_path / "bad.npz", **(golden_arrays("base_mem5") | {"sd/r_w_bias": hostile}))
    with pytest.raises(CheckpointError, match="plain arrays"):
        read_original(tmp_path / "bad.npz")
    assert not mark.exists()


def test_a_state_dict_without_its_config(tmp_path: Path) -> None:
    arrays = golden_arrays("base_mem5")
    del arrays["config_json"]
    np.savez(tmp_path / "bare.npz", **arrays)
    with pytest.raises(ConfigError, match=r"bare\.npz has no architecture.*config_json"):
        read_original(tmp_path / "bare.npz")


HF_DIRECTORIES = {path.name: path for path in hf_directories()}


def assert_nats_as_transformers(model: TransformerXL, directory: Path) -> None:
    expected = {
        key: torch.from_numpy(array)
        for key, array in read_arrays(directory / "expected.npz").items()
    }
    segments = [
        (expected[f"input/{k}"], expected[f"target/{k}"]) for k in range(num_segments(expected))
    ]
    assert segments
    for k, nats_BT in enumerate(nats_of(model, segments)):
        assert_close(nats_BT, expected[f"nll/{k}"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", HF_DIRECTORIES)
def test_transformers_directory(name: str) -> None:
    directory = HF_DIRECTORIES[name]
    assert_nats_as_transformers(read_transformers(directory), directory)


@pytest.mark.parametrize("kept", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("name", HF_DIRECTORIES)
def test_transformers_directory_of_safetensors_without_the_repeated_names(
    name: str, kept: int, tmp_path: Path
) -> None:
    directory = HF_DIRECTORIES[name]
    weights = transformers_weights(directory)
    names = defaultdict(list)
    for weight_name, tensor in weights.items():
        names[tensor.data_ptr()].append(weight_name)
    once = {same[kept]: weights[same[kept]].clone() for same in names.values()}
    shutil.copyfile(directory / "config.json", tmp_path / "config.json")
    save_file(once, tmp_path / "model.safetensors")
    assert_nats_as_transformers(read_transformers(tmp_path), directory)


def transformers_weights(directory: Path) -> dict[str, Tensor]:
    """Tied tensors share their memory where the file is a pickle."""
    safe = directory / "model.safetensors"
    if safe.exists():
        return load_file(safe)
    return torch.load(directory / "pytorch_model.bin", weights_only=True)
