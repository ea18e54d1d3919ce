"""Models of a few hundred weights in float64. Every weight has a visible effect on the loss."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from txl_dist.model.choices import RECIPES
from txl_dist.model.config import ModelConfig, RotaryScaling
from txl_dist.model.dropout import DropoutMasks
from txl_dist.model.memory import memory_kind
from txl_dist.model.memory.recurrent import KVCache
from txl_dist.model.transformer_xl import TransformerXL

VOCAB_SIZE = 11

MODERN: dict[str, dict[str, Any]] = {
    "modern": RECIPES["modern"] | {"init_std": 0.4},
    "grouped": {
        "n_head": 4,
        "n_kv_head": 2,
        "qkv_biases": True,
        "distance_encoding": "rotary",
        "rotary_base": 50.0,
        "rotary_scaling": RotaryScaling(kind="llama3", factor=3.0, original_len=16),
        "feed_forward": "relu2",
    },
    "normed": {
        "qk_norm": True,
        "norm": "rmsnorm",
        "norm_epsilon": 1e-3,
        "biases": False,
        "cutoffs": (4, 9),
    },
}
"""Settings of the block, each of them in one of these at least. Read in segments with memories that
are long enough, they give the numbers of one segment."""
SHORT_AND_LONG: dict[str, Any] = {"mem_shares": (0.4, 1.0)}
"""Layers with memories of another length."""


CONSTANT_AT_START = ("gain_K", "query.bias", "key_value.bias")


def small_model(*, seed: int = 0, **options: Any) -> TransformerXL:
    """A model with different sizes for all dimensions; `options` are fields of its config."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "n_layer": 2,
        "d_model": 6,
        "n_head": 3,
        "d_head": 4,
        "d_inner": 7,
        "mem_len": 5,
        "compression_rate": 2,
        "memory_tokens": 3,
        "init_std": 0.4,
        "proj_init_std": 0.4,
    }
    model = TransformerXL(ModelConfig(**(sizes | options)), seed=seed).double()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        is_rms_gain = model.config.norm == "rmsnorm" and name.endswith("norm.weight")
        if is_rms_gain or name.endswith(CONSTANT_AT_START):
            with torch.no_grad():
                parameter.add_(torch.randn(parameter.shape, generator=generator))
    return model


def recorded_memory_lens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The list to which every new `KVCache` adds the memory lengths of its layers."""
    lens: list[int] = []
    of_lengths = KVCache.of_lengths

    def recording(config: ModelConfig, num_lanes: int, mem_lens: Sequence[int]) -> KVCache:
        lens.extend(mem_lens)
        return of_lengths(config, num_lanes, mem_lens)

    monkeypatch.setattr(KVCache, "of_lengths", recording)
    return lens


def random_text(num_lanes: int, num_tokens: int, *, seed: int = 0) -> Tensor:
    """Token ids [B, N]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (num_lanes, num_tokens), generator=generator)


def read_stream(
    model: TransformerXL,
    text_BN: Tensor,
    *,
    tgt_len: int,
    mem_len: int | None = None,
    memory: Any = None,
    masks: DropoutMasks | None = None,
) -> tuple[Tensor, Any]:
    """Nats [B, N - 1] of one text, read `tgt_len` tokens at a time, and the last memory.

    The first one is `memory`, or an empty one of `mem_len` tokens. Segments have the same `masks`.
    """
    config = model.config
    if mem_len is not None:
        config = replace(config, mem_len=mem_len)
    memory = memory or memory_kind(config).empty(len(text_BN), dtype=model.weight.dtype)
    age_BN = torch.arange(text_BN.shape[1]).expand_as(text_BN)
    columns = [tensor[:, :-1] for tensor in (text_BN, age_BN)]
    segments = zip(
        columns[0].split(tgt_len, 1),
        text_BN[:, 1:].split(tgt_len, 1),
        columns[1].split(tgt_len, 1),
        strict=True,
    )
    nats = []
    for input_BT, target_BT, age_BT in segments:
        nats_BT, memory = model(input_BT, target_BT, age_BT, memory, masks)
        nats.append(nats_BT)
    return torch.cat(nats, dim=1), memory
