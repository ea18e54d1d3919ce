"""The parameter names of the paper's code, and what they are called here.

The original keeps one matrix for queries, keys and values, cuts the softmax's bias by cluster,
counts the clusters' columns backwards and repeats tied tensors under two names. Serves the golden
tests and imports of foreign weights; works on any tensors, gradients included.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from txl_dist.model.config import ModelConfig

_LAYER_NAMES = {
    "dec_attn.o_net.weight": "attention.out.weight",
    "dec_attn.layer_norm.weight": "attention_norm.weight",
    "dec_attn.layer_norm.bias": "attention_norm.bias",
    "pos_ff.CoreNet.0.weight": "feed_forward.up.weight",
    "pos_ff.CoreNet.0.bias": "feed_forward.up.bias",
    "pos_ff.CoreNet.3.weight": "feed_forward.down.weight",
    "pos_ff.CoreNet.3.bias": "feed_forward.down.bias",
    "pos_ff.layer_norm.weight": "feed_forward_norm.weight",
    "pos_ff.layer_norm.bias": "feed_forward_norm.bias",
}
_BIASES = {"r_w_bias": "content_bias_HK", "r_r_bias": "distance_bias_HK"}
_BY_ENCODING = {
    "sinusoidal": {"dec_attn.r_net.weight": "attention.distances.project.weight"},
    "shaw": {
        "r_w_bias": "attention.distances.content_bias_HK",
        "r_emb": "attention.distances.distance_SHK",
        "r_bias": "attention.distances.score_SH",
    },
}
_STACKED = ("r_w_bias", "r_emb", "r_bias")
"""Shaw's, which the original keeps in one tensor for all layers, the farthest distance first."""
_REVERSED = ("crit.cluster_weight", "crit.cluster_bias")
"""Rows of clusters, which the original reads from the last to the first."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows [start, stop) of one of our tensors; stop None is all of them."""

    name: str
    start: int = 0
    stop: int | None = None


def _originals(config: ModelConfig) -> dict[str, tuple[_Rows, ...]]:
    """Original name -> our rows, which stand one below the other in the original's tensor."""
    names = _ends(config)
    if config.shares_biases:
        names |= {name: (_Rows(ours),) for name, ours in _BIASES.items()}
    width = config.n_head * config.d_head
    for layer in range(config.n_layer):
        here = f"layers.{layer}."
        own = _LAYER_NAMES | _BY_ENCODING.get(config.distance_encoding, {})
        names |= {here + original: (_Rows(here + ours),) for original, ours in own.items()}
        if config.untie_r:  # an option of its descendants
            for name, ours in _BIASES.items():
                names[f"{here}dec_attn.{name}"] = (_Rows(f"{here}attention.distances.{ours}"),)
        query = _Rows(here + "attention.query.weight", 0, width)
        key_value = _Rows(here + "attention.key_value.weight", 0, 2 * width)
        if config.distance_encoding == "absolute":
            names[here + "dec_attn.q_net.weight"] = (query,)
            names[here + "dec_attn.kv_net.weight"] = (key_value,)
        else:
            names[here + "dec_attn.qkv_net.weight"] = (query, key_value)
    return names


def _ends(config: ModelConfig) -> dict[str, tuple[_Rows, ...]]:
    """Input tables and softmax; what is tied stands under its input name alone."""
    names: dict[str, tuple[_Rows, ...]] = {}
    for table, (start, stop) in enumerate(config.table_bounds):
        names[f"word_emb.emb_layers.{table}.weight"] = (_Rows(f"table.weights.{table}"),)
        names[f"crit.out_layers.{table}.bias"] = (_Rows("softmax.bias", start, stop),)
        if not config.tie_weight:
            names[f"crit.out_layers.{table}.weight"] = (_Rows(f"softmax.weights.{table}"),)
        if config.has_projection:
            names[f"word_emb.emb_projs.{table}"] = (_Rows(f"table.projections.{table}"),)
    for cluster in range(config.num_clusters):
        if config.has_projection and not config.is_tied(cluster):
            names[f"crit.out_projs.{cluster}"] = (_Rows(f"softmax.projections.{cluster}"),)
    if config.cutoffs:
        names["crit.cluster_weight"] = (_Rows("softmax.cluster_weight"),)
        names["crit.cluster_bias"] = (_Rows("softmax.cluster_bias"),)
    return names


def from_original(
    tensors: Mapping[str, Tensor], config: ModelConfig, *, clusters_reversed: bool = True
) -> dict[str, Tensor]:
    """Our state dict from the original's; what is tied is read once.

    `clusters_reversed=False` for those of its descendants that count clusters forwards.
    """
    if config.distance_encoding == "shaw":
        tensors = _by_layer(tensors, config)
    found: dict[str, list[tuple[int, Tensor]]] = {}
    for original, rows in _originals(config).items():
        reverse = clusters_reversed and original in _REVERSED
        tensor = tensors[original].flip(0) if reverse else tensors[original]
        first = 0
        for part in rows:
            length = len(tensor) if part.stop is None else part.stop - part.start
            found.setdefault(part.name, []).append((part.start, tensor[first : first + length]))
            first += length
    return {
        name: torch.cat([tensor for _, tensor in sorted(parts, key=lambda part: part[0])])
        for name, parts in found.items()
    }


def to_original(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The other way: tensors by our names (weights or gradients) under the original's names."""
    named = {}
    for original, rows in _originals(config).items():
        tensor = torch.cat([tensors[part.name][part.start : part.stop] for part in rows])
        named[original] = tensor.flip(0) if original in _REVERSED else tensor
    if config.distance_encoding == "shaw":
        for name in _STACKED:
            layers = [named.pop(f"layers.{layer}.{name}") for layer in range(config.n_layer)]
            stacked = torch.stack(layers)
            named[name] = stacked if name == "r_w_bias" else stacked.flip(1)
    return named


def _by_layer(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The original's tensors with Shaw's cut into layers, distance 0 first."""
    cut = dict(tensors)
    for name in _STACKED:
        stacked = cut.pop(name) if name == "r_w_bias" else cut.pop(name).flip(1)
        cut |= {f"layers.{layer}.{name}": stacked[layer] for layer in range(config.n_layer)}
    return cut
