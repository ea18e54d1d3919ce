"""An imported model computes what the program that saved it computes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.testing import assert_close

from tests.txl_dist.foreign.sources import GOLDEN, HF, golden_arrays, hf_copy, hf_weights
from txl_dist.errors import ConfigError
from txl_dist.foreign.original import read_original
from txl_dist.foreign.transformers import read_transformers
from txl_dist.model.transformer_xl import TransformerXL

ATTN_TYPE = {
    path.stem: json.loads(str(golden_arrays(path.stem)["config_json"]))["attn_type"]
    for path in sorted(GOLDEN.glob("*.npz"))
}
SUPPORTED = [name for name, attn_type in ATTN_TYPE.items() if attn_type == 0]
OTHERS = [name for name, attn_type in ATTN_TYPE.items() if attn_type != 0]


def nats_of(model: TransformerXL, segments: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Nats of consecutive segments [B, T], the memory empty at their start."""
    memory, start, nats = model.empty_memory(len(segments[0][0])), 0, []
    for input_BT, target_BT in segments:
        stop = start + input_BT.shape[1]
        age_BT = torch.arange(start, stop).expand_as(input_BT)
        with torch.no_grad():
            nats_BT, memory = model(input_BT, target_BT, age_BT, memory)
        nats.append(nats_BT)
        start = stop
    return nats


def assert_nats_as_transformers(model: TransformerXL) -> None:
    with np.load(HF / "expected.npz", allow_pickle=False) as file:
        expected = {key: torch.from_numpy(file[key]) for key in file.files}
    segments = [(expected[f"input/{k}"], expected[f"target/{k}"]) for k in range(3)]
    for k, nats_BT in enumerate(nats_of(model, segments)):
        assert_close(nats_BT, expected[f"nll/{k}"], rtol=0, atol=1e-4)


def test_transformers_directory() -> None:
    assert_nats_as_transformers(read_transformers(HF))


def test_transformers_directory_of_safetensors_without_the_repeated_names(tmp_path: Path) -> None:
    source = hf_copy(tmp_path / "hf")
    (source / "pytorch_model.bin").unlink()
    kept = hf_weights()
    for name in ("crit.out_projs.1", "crit.out_layers.0.weight", "crit.out_layers.2.weight"):
        del kept[name]
    del kept["transformer.word_emb.emb_projs.2"]  # its other name stays
    save_file({name: tensor.clone() for name, tensor in kept.items()}, source / "model.safetensors")
    assert_nats_as_transformers(read_transformers(source))


def test_every_attention_of_the_original_that_we_have_is_tested() -> None:
    assert len(SUPPORTED) >= 10


@pytest.mark.parametrize("name", SUPPORTED)
def test_state_dict_of_the_original(name: str) -> None:
    arrays = golden_arrays(name)
    segments = [
        (torch.from_numpy(arrays[f"input/{k}"]).t(), torch.from_numpy(arrays[f"target/{k}"]).t())
        for k in range(3)
    ]
    nats = nats_of(read_original(GOLDEN / f"{name}.npz").double(), segments)
    for k, nats_BT in enumerate(nats):
        assert_close(nats_BT, torch.from_numpy(arrays[f"nll/{k}"]).t(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", OTHERS)
def test_another_attention_of_the_original_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="attn_type"):
        read_original(GOLDEN / f"{name}.npz")


def test_names_without_prefix_and_the_config_beside(tmp_path: Path) -> None:
    arrays = golden_arrays("adapt_div2_tied_tieproj")
    (tmp_path / "plain.json").write_text(str(arrays["config_json"]))
    plain = {name.removeprefix("sd/"): a for name, a in arrays.items() if name.startswith("sd/")}
    np.savez(tmp_path / "plain.npz", **plain)
    expected = read_original(GOLDEN / "adapt_div2_tied_tieproj.npz")
    found = read_original(tmp_path / "plain.npz")
    assert found.config == expected.config
    for name, weight in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight), name
