"""Models of a few hundred weights in float64. Every weight has a visible effect on the loss."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from txl_dist.model.config import ModelConfig
from txl_dist.model.memory import memory_kind
from txl_dist.model.transformer_xl import TransformerXL

VOCAB_SIZE = 11


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
        "init_std": 0.4,
        "proj_init_std": 0.4,
    }
    return TransformerXL(ModelConfig(**(sizes | options)), seed=seed).double()


def random_text(num_lanes: int, num_tokens: int, *, seed: int = 0) -> Tensor:
    """Token ids [B, N]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (num_lanes, num_tokens), generator=generator)


def read_stream(
    model: TransformerXL, text_BN: Tensor, *, tgt_len: int, mem_len: int | None = None
) -> tuple[Tensor, Any]:
    """Nats [B, N - 1] of one text, read `tgt_len` tokens at a time, and the last memory."""
    config = model.config
    if mem_len is not None:
        config = replace(config, mem_len=mem_len)
    memory = memory_kind(config).empty(len(text_BN), dtype=torch.float64)
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
        nats_BT, memory = model(input_BT, target_BT, age_BT, memory)
        nats.append(nats_BT)
    return torch.cat(nats, dim=1), memory
