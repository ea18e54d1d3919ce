"""Conversion between the parameter names of the paper's code and ours.

The original has one matrix for queries, keys and values, splits the softmax's bias by cluster,
stores the clusters' columns in reverse, and repeats tied tensors under two names. Used by the
golden tests and by imports; works on any tensors of these shapes, including gradients.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _OriginalEncoding:
    """One `attn_type` of the original."""

    layer_names: dict[str, str] = field(default_factory=dict)
    stacked: tuple[str, ...] = ()
    """Names of `layer_names` that the original stores as one tensor [n_layer, ...]."""
    farthest_first: tuple[str, ...] = ()
    """Stacked tensors [n_layer, distances, ...], in which the largest distance is the first row."""
    has_separate_query: bool = False


_ENCODINGS = {
    "sinusoidal": _OriginalEncoding(
        layer_names={"dec_attn.r_net.weight": "attention.distances.project.weight"}
    ),
    "shaw": _OriginalEncoding(
        layer_names={
            "r_w_bias": "attention.distances.content_bias_HK",
            "r_emb": "attention.distances.distance_SHK",
            "r_bias": "attention.distances.score_SH",
        },
        stacked=("r_w_bias", "r_emb", "r_bias"),
        farthest_first=("r_emb", "r_bias"),
    ),
    "absolute": _OriginalEncoding(has_separate_query=True),
}
"""The original has these three distance encodings only."""
_REVERSED = ("crit.cluster_weight", "crit.cluster_bias")
"""One row per cluster; the original's first row is the last cluster."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows [start, stop) of one of our tensors; stop None means all."""

    name: str
    start: int = 0
    stop: int | None = None


BLOCK_SETTINGS = (
    *("norm", "final_norm", "qk_norm", "attention_scale", "output_gate", "feed_forward"),
    *("biases", "residual_scalars", "memory", "mem_shares"),
)
"""Settings of the block that the original does not have: its models have their defaults."""


def _require_original(config: ModelConfig) -> None:
    """Raise ValueError for a model whose function the original's weights do not describe."""
    defaults = ModelConfig()
    for name in BLOCK_SETTINGS:
        if (value := getattr(config, name)) != (default := getattr(defaults, name)):
            raise ValueError(f"{name}={value!r}: models of the original have {default!r}")
    if config.distance_encoding not in _ENCODINGS:
        raise ValueError(
            f"distance_encoding={config.distance_encoding}: the original has only "
            f"{', '.join(_ENCODINGS)}"
        )


def _originals(config: ModelConfig) -> dict[str, tuple[_Rows, ...]]:
    """Original name -> our rows, which are concatenated in the original's tensor."""
    names, encoding = _ends(config), _ENCODINGS[config.distance_encoding]
    if config.shares_biases:
        names |= {name: (_Rows(ours),) for name, ours in _BIASES.items()}
    width = config.n_head * config.d_head
    for layer in range(config.n_layer):
        prefix = f"layers.{layer}."
        layer_names = _LAYER_NAMES | encoding.layer_names
        names |= {prefix + name: (_Rows(prefix + ours),) for name, ours in layer_names.items()}
        if config.untie_r:  # an option of transformers
            for name, ours in _BIASES.items():
                names[f"{prefix}dec_attn.{name}"] = (_Rows(f"{prefix}attention.distances.{ours}"),)
        # Queries come first in the original's tensor, then keys, then values.
        query = _Rows(prefix + "attention.query.weight", 0, width)
        key_value = _Rows(prefix + "attention.key_value.weight", 0, 2 * width)
        if encoding.has_separate_query:
            names[prefix + "dec_attn.q_net.weight"] = (query,)
            names[prefix + "dec_attn.kv_net.weight"] = (key_value,)
        else:
            names[prefix + "dec_attn.qkv_net.weight"] = (query, key_value)
    return names


def _ends(config: ModelConfig) -> dict[str, tuple[_Rows, ...]]:
    """Embedding and softmax; tied tensors have the embedding's name only."""
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
    """Our state dict from the original's; a tied tensor is read from one of its names.

    `clusters_reversed=False` reads clusters in ascending order, as transformers stores them. Raises
    ValueError for a model with settings that the original does not have.
    """
    _require_original(config)
    tensors = _unstack(tensors, config)
    rows_of: dict[str, list[tuple[int, Tensor]]] = {}
    for original, rows in _originals(config).items():
        reverse = clusters_reversed and original in _REVERSED
        tensor = tensors[original].flip(0) if reverse else tensors[original]
        first = 0
        for part in rows:
            length = len(tensor) if part.stop is None else part.stop - part.start
            rows_of.setdefault(part.name, []).append((part.start, tensor[first : first + length]))
            first += length
    return {
        name: torch.cat([tensor for _, tensor in sorted(parts, key=lambda part: part[0])])
        for name, parts in rows_of.items()
    }


def to_original(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The inverse: tensors by our names (weights or gradients) under the original's names."""
    _require_original(config)
    named = {}
    for original, rows in _originals(config).items():
        tensor = torch.cat([tensors[part.name][part.start : part.stop] for part in rows])
        named[original] = tensor.flip(0) if original in _REVERSED else tensor
    encoding = _ENCODINGS[config.distance_encoding]
    for name in encoding.stacked:
        layers = [named.pop(f"layers.{layer}.{name}") for layer in range(config.n_layer)]
        stacked = torch.stack(layers)
        named[name] = stacked.flip(1) if name in encoding.farthest_first else stacked
    return named


def _unstack(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The original's tensors with stacked ones split into layers, distance 0 first."""
    encoding, split = _ENCODINGS[config.distance_encoding], dict(tensors)
    for name in encoding.stacked:
        stacked = split.pop(name)
        stacked = stacked.flip(1) if name in encoding.farthest_first else stacked
        split |= {f"layers.{layer}.{name}": stacked[layer] for layer in range(config.n_layer)}
    return split
