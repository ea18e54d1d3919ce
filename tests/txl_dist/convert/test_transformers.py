"""A model imported from transformers computes what transformers computes."""

import shutil
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from tests.support.replayed_models import (
    hf_directories,
    num_segments,
    read_arrays,
)
from tests.txl_dist.convert.example_files import nats_of
from txl_dist.convert.transformers import read_transformers
from txl_dist.model.transformer_xl import TransformerXL

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
