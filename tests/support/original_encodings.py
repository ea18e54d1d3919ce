"""Weights of the original's `attn_type` 1 and 2, for golden tests: no import reads these models.

They differ from those of `attn_type` 0, which `txl_dist.convert.original_model` converts, in the
tensors of the distance encoding and in how queries, keys and values are stored.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from txl_dist.convert.original_model import from_original, to_original
from txl_dist.model.config import ModelConfig

SHAW = {"r_w_bias": "content_bias_HK", "r_emb": "distance_SHK", "r_bias": "score_SH"}
"""Stacked in the original, [n_layer, ...]; in the last two, the largest distance comes first."""


def of_any_encoding(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our state dict from the original's, of `attn_type` 0, 1 or 2."""
    if config.distance_encoding == "sinusoidal":
        return from_original(tensors, config)
    common, own = dict(tensors), {}
    for layer in range(config.n_layer):
        prefix = f"layers.{layer}.dec_attn."
        if config.distance_encoding == "absolute":
            parts = [common.pop(f"{prefix}{name}_net.weight") for name in ("q", "kv")]
            common[f"{prefix}qkv_net.weight"] = torch.cat(parts)
        else:
            for name, ours in SHAW.items():
                stacked = _nearest_first(name, tensors[name])
                own[f"layers.{layer}.attention.distances.{ours}"] = stacked[layer]
        common[f"{prefix}r_net.weight"] = torch.zeros(1)
    common |= {"r_w_bias": torch.zeros(1), "r_r_bias": torch.zeros(1)}
    converted = from_original(common, replace(config, distance_encoding="sinusoidal"))
    of_the_paper = ("content_bias_HK", "distance_bias_HK")
    return own | {
        name: x
        for name, x in converted.items()
        if ".distances." not in name and name not in of_the_paper
    }


def to_any_encoding(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The inverse, of weights or gradients."""
    if config.distance_encoding == "sinusoidal":
        return to_original(tensors, config)
    added = {"content_bias_HK": torch.zeros(1), "distance_bias_HK": torch.zeros(1)}
    added |= {
        f"layers.{layer}.attention.distances.project.weight": torch.zeros(1)
        for layer in range(config.n_layer)
    }
    named = to_original({**tensors, **added}, replace(config, distance_encoding="sinusoidal"))
    named = {name: x for name, x in named.items() if "r_net" not in name and name[:2] != "r_"}
    width = config.n_head * config.d_head
    for layer in range(config.n_layer):
        prefix = f"layers.{layer}.dec_attn."
        if config.distance_encoding == "absolute":
            qkv = named.pop(f"{prefix}qkv_net.weight")
            named[f"{prefix}q_net.weight"] = qkv[:width]
            named[f"{prefix}kv_net.weight"] = qkv[width:]
    if config.distance_encoding == "shaw":
        for name, ours in SHAW.items():
            names = (f"layers.{n}.attention.distances.{ours}" for n in range(config.n_layer))
            named[name] = _nearest_first(name, torch.stack([tensors[each] for each in names]))
    return named


def _nearest_first(name: str, stacked: Tensor) -> Tensor:
    return stacked if name == "r_w_bias" else stacked.flip(1)
