"""The original's numbers: nats, memories and gradients of three consecutive segments."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from txl_dist.model.config import ModelConfig
from txl_dist.model.memory import Memory
from txl_dist.model.original_weights import from_original, to_original
from txl_dist.model.transformer_xl import TransformerXL

GOLDEN = Path(os.environ.get("TXL_GOLDEN_DIR", Path(__file__).parents[2] / "golden"))
NAMES = [
    "base_mem5",
    "mem0",
    "mem10",
    "mem7_untied",
    "clamp4_mem10",
    "samelen_mem10",
    "prelnorm_mem10",
    "dembed16_mem10",
    "adapt_div1_tied",
    "adapt_div2_tied_tieproj",
    "attn1_mem5",
    "attn2_mem0",
]
FORMS = ["reference", "fused", "biased"]
ENCODINGS = {0: "sinusoidal", 1: "shaw", 2: "absolute"}
"""By the original's `attn_type`."""
SEGMENTS = range(3)


@dataclass(frozen=True)
class Golden:
    """One file of the original's numbers, turned batch-major."""

    arrays: dict[str, np.ndarray]
    config: ModelConfig

    def tensor(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.from_numpy(self.arrays[key].copy()).to(dtype)

    def model(self, dtype: torch.dtype) -> TransformerXL:
        weights = {
            key.removeprefix("sd/"): self.tensor(key)
            for key in self.arrays
            if key.startswith("sd/")
        }
        model = TransformerXL(self.config)
        model.load_state_dict(from_original(weights, self.config))
        return model.to(dtype)

    def segment(self, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        input_BT, target_BT = self.tensor(f"input/{k}").t(), self.tensor(f"target/{k}").t()
        tgt_len = input_BT.shape[1]
        age_BT = torch.arange(k * tgt_len, (k + 1) * tgt_len).expand(input_BT.shape)
        return input_BT, target_BT, age_BT


def load(name: str, attention: str) -> Golden:
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    original = json.loads(str(arrays["config_json"]))
    kept = ("n_layer", "d_model", "n_head", "d_head", "d_inner", "d_embed", "mem_len")
    clamp_len = original["clamp_len"] if original["clamp_len"] > 0 else None
    if original["attn_type"] == 1:  # as many distances as the original's table has rows
        clamp_len = len(arrays["sd/r_emb"][0]) - 1
    config = ModelConfig(
        **{key: original[key] for key in (*kept, "same_length", "tie_weight", "pre_lnorm")},
        vocab_size=original["n_token"],
        cutoffs=tuple(original["cutoffs"]),
        div_val=original["div_val"],
        tie_projs=tuple(original["tie_projs"]) if original["div_val"] > 1 else (),
        distance_encoding=ENCODINGS[original["attn_type"]],
        clamp_len=clamp_len,
        attention=attention,
    )
    return Golden(arrays, config)


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=["fp64", "fp32"]
)
def test_nats_and_memories_equal_the_originals(
    name: str, attention: str, dtype: torch.dtype, tolerance: float
) -> None:
    golden = load(name, attention)
    model = golden.model(dtype)
    memory = model.empty_memory(2)
    for k in SEGMENTS:
        with torch.no_grad():
            nats_BT, memory = model(*golden.segment(k), memory)
        expected = golden.tensor(f"nll/{k}").t().to(dtype)
        assert_close(nats_BT, expected, rtol=0, atol=tolerance)
        assert_memories_equal(memory, golden, k)


def assert_memories_equal(memory: Memory, golden: Golden, k: int) -> None:
    """The original's grow until mem_len; ours are as long from the start, the oldest unused."""
    for layer, memory_BMD in enumerate(memory.layers):
        if golden.config.mem_len == 0:
            assert memory_BMD.shape[1] == 0
            continue
        expected_BMD = golden.tensor(f"mem/{k}/{layer}").transpose(0, 1)
        newest_BMD = memory_BMD[:, -expected_BMD.shape[1] :].float()
        # Stored in float32, of activations up to about 10.
        assert_close(newest_BMD, expected_BMD, rtol=0, atol=2e-5)


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_the_originals(name: str, attention: str) -> None:
    golden = load(name, attention)
    model = golden.model(torch.float64)
    with torch.no_grad():
        _, memory = model(*golden.segment(0), model.empty_memory(2))
    model(*golden.segment(1), memory)[0].mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    ours = to_original(gradients, golden.config)

    expected = {k.removeprefix("gradnorm/") for k in golden.arrays if k.startswith("gradnorm/")}
    assert set(ours) == expected
    assert full_gradients(golden) in (set(), expected)
    for original, gradient in ours.items():
        assert_close(
            gradient.norm(), golden.tensor(f"gradnorm/{original}").squeeze(), rtol=1e-9, atol=0
        )
        if f"grad/{original}" in golden.arrays:
            # Computed in float64 and stored in float32, which rounds to nearest: off by at most
            # 2^-24 of the value. Sums in another order change float64 by far less than 1e-12.
            full = golden.tensor(f"grad/{original}").double()
            assert_close(gradient, full, rtol=2**-24, atol=1e-12, msg=lambda m, o=original: o + m)


def full_gradients(golden: Golden) -> set[str]:
    return {key.removeprefix("grad/") for key in golden.arrays if key.startswith("grad/")}


def test_not_only_norms_are_compared() -> None:
    assert sum(bool(full_gradients(load(name, "reference"))) for name in NAMES) >= 6
