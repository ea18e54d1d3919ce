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
    "dec_attn.r_net.weight": "attention.distance.weight",
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
    if not config.untie_r:
        names |= {name: (_Rows(ours),) for name, ours in _BIASES.items()}
    width = config.n_head * config.d_head
    for layer in range(config.n_layer):
        here = f"layers.{layer}."
        names |= {here + original: (_Rows(here + ours),) for original, ours in _LAYER_NAMES.items()}
        if config.untie_r:  # an option of its descendants
            for name, ours in _BIASES.items():
                names[f"{here}dec_attn.{name}"] = (_Rows(f"{here}attention.{ours}"),)
        names[here + "dec_attn.qkv_net.weight"] = (
            _Rows(here + "attention.query.weight", 0, width),
            _Rows(here + "attention.key_value.weight", 0, 2 * width),
        )
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
    return named
