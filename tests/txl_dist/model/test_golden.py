"""The original's numbers: nats, memories and gradients of three consecutive segments."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.support.original_encodings import of_any_encoding, to_any_encoding
from tests.support.replayed_models import (
    OWN_GOLDEN,
    golden_files,
    num_segments,
    original_arguments,
    read_arrays,
)
from txl_dist.convert.original_model import original_config
from txl_dist.model.config import ModelConfig
from txl_dist.model.memory.recurrent import RecurrentMemory
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.model.vocabulary import IGNORED

IMPLEMENTATIONS = ["reference", "cpu", "sdpa"]
ENCODINGS = {0: "sinusoidal", 1: "shaw", 2: "absolute"}
"""By the original's `attn_type`."""
FILES = {
    path.stem: path
    for path in golden_files()
    if original_arguments(path).get("attn_type", 0) in ENCODINGS
}
"""The others are refused (tests/txl_dist/convert/test_original_model.py)."""
WITHOUT_EXTENSION = [
    name for name, path in FILES.items() if not original_arguments(path).get("ext_len")
]


@dataclass(frozen=True)
class Golden:
    """One file of the original's numbers, batch-major."""

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
        model.load_state_dict(of_any_encoding(weights, self.config))
        return model.to(dtype)

    def segment(self, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Input, target and age.

        With `ext_len`, a segment repeats the end of the previous one; there targets are IGNORED.
        """
        input_BT, scored_BT = self.tensor(f"input/{k}").t(), self.tensor(f"target/{k}").t()
        target_BT = torch.full_like(input_BT, IGNORED)
        target_BT[:, self.num_repeated(k) :] = scored_BT
        stop = sum(len(self.arrays[f"target/{i}"]) for i in range(k + 1))
        age_BT = torch.arange(stop - input_BT.shape[1], stop).expand(input_BT.shape)
        return input_BT, target_BT, age_BT

    def num_repeated(self, k: int) -> int:
        """Tokens at the start of segment `k` that repeat the previous segment."""
        return len(self.arrays[f"input/{k}"]) - len(self.arrays[f"target/{k}"])

    def read(
        self, k: int, model: TransformerXL, memory: RecurrentMemory
    ) -> tuple[torch.Tensor, RecurrentMemory]:
        """The scored nats of segment `k`, and the memory for the next segment."""
        input_BT, target_BT, age_BT = self.segment(k)
        nats_BT, after = model(input_BT, target_BT, age_BT, memory)
        following = k + 1 < num_segments(self.arrays)
        if following and (repeated := self.num_repeated(k + 1)):
            # The memory must not hold tokens that the next segment repeats.
            _, after = model(*(x[:, :-repeated] for x in self.segment(k)), memory)
        return nats_BT[:, self.num_repeated(k) :], after


def load(path: Path, attention: str) -> Golden:
    arrays = read_arrays(path)
    arguments = original_arguments(path)
    encoding = ENCODINGS[arguments.get("attn_type", 0)]
    config = original_config(arguments | {"attn_type": 0}, origin=str(path))
    if encoding == "shaw":  # as many distances as the original's table has rows
        config = replace(config, clamp_len=len(arrays["sd/r_emb"][0]) - 1)
    config = replace(config, distance_encoding=encoding, attention=attention)
    return Golden(arrays, config)


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=["fp64", "fp32"]
)
def test_nats_and_memories_equal_the_originals(
    name: str, attention: str, dtype: torch.dtype, tolerance: float
) -> None:
    golden = load(FILES[name], attention)
    model = golden.model(dtype)
    memory = model.empty_memory(golden.arrays["input/0"].shape[1])
    # With ext_len, the original's first memory wrongly holds tokens that the next segment repeats.
    has_no_extension = name in WITHOUT_EXTENSION
    for k in range(num_segments(golden.arrays)):
        with torch.no_grad():
            nats_BT, memory = golden.read(k, model, memory)
        expected = golden.tensor(f"nll/{k}" if has_no_extension else f"nv_nll/{k}").t().to(dtype)
        assert_close(nats_BT, expected, rtol=0, atol=tolerance)
        if has_no_extension:
            assert_memories_equal(memory, golden, k)


def assert_memories_equal(memory: RecurrentMemory, golden: Golden, k: int) -> None:
    """The original's memory grows to `mem_len`; ours has that length from the start."""
    for layer, memory_BMD in enumerate(memory.layers):
        if golden.config.mem_len == 0:
            assert memory_BMD.shape[1] == 0
            continue
        expected_BMD = golden.tensor(f"mem/{k}/{layer}").transpose(0, 1)
        newest_BMD = memory_BMD[:, -expected_BMD.shape[1] :].float()
        # Stored in float32; activations are at most about 10.
        assert_close(newest_BMD, expected_BMD, rtol=0, atol=2e-5)


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", WITHOUT_EXTENSION)
def test_gradients_equal_the_originals(name: str, attention: str) -> None:
    golden = load(FILES[name], attention)
    model = golden.model(torch.float64)
    with torch.no_grad():
        empty = model.empty_memory(golden.arrays["input/0"].shape[1])
        _, memory = model(*golden.segment(0), empty)
    model(*golden.segment(1), memory)[0].mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    named = to_any_encoding(gradients, golden.config)

    expected = {k.removeprefix("gradnorm/") for k in golden.arrays if k.startswith("gradnorm/")}
    assert expected <= set(named)
    assert full_gradients(golden) in (set(), expected)
    for original, gradient in named.items():
        if original not in expected:
            # The original skips a cluster without targets.
            assert not gradient.any(), original
            continue
        assert_close(
            gradient.norm(), golden.tensor(f"gradnorm/{original}").squeeze(), rtol=1e-9, atol=0
        )
        if f"grad/{original}" in golden.arrays:
            # Computed in float64 and stored in float32: a relative rounding error of at most 2^-24.
            # Another order of summation changes float64 by far less than 1e-12.
            full = golden.tensor(f"grad/{original}").double()
            assert_close(gradient, full, rtol=2**-24, atol=1e-12, msg=lambda m, o=original: o + m)


def full_gradients(golden: Golden) -> set[str]:
    return {key.removeprefix("grad/") for key in golden.arrays if key.startswith("grad/")}


def test_full_gradients_are_compared_too() -> None:
    own = [read_arrays(path) for path in OWN_GOLDEN.glob("*.npz")]
    assert sum(any(key.startswith("grad/") for key in arrays) for arrays in own) >= 6
