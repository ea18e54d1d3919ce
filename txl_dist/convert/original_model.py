"""The paper's Transformer-XL as its own code and transformers' TransfoXL describe and store it.

Configs are JSON, constructor arguments or a `TransfoXLConfig`; only the options that determine the
model's function are read. Weights: the original has one matrix for queries, keys and values, splits
the softmax's bias by cluster, stores the clusters' columns in reverse, and repeats tied tensors
under two names. The conversion of names works on any tensors of these shapes, including gradients:
the golden tests use it, too.

Source: the constructor of `MemTransformerLM` (the paper's code), and `TransfoXLConfig`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from txl_dist.convert.checks import assign_weights, check_tensors, checked_config, empty_model
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL

_SAME_NAME = ("n_layer", "d_model", "n_head", "d_head", "d_inner", "mem_len")
_SAME_NAME_OPTIONAL = (
    "d_embed",
    "div_val",
    "cutoffs",
    "same_length",
    "pre_lnorm",
    "dropout",
    "dropatt",
    "init_std",
    "proj_init_std",
)

BLOCK_SETTINGS = (
    *("norm", "final_norm", "qk_norm", "qkv_biases", "n_kv_head", "feed_forward", "biases"),
    *("memory", "mem_shares", "distance_encoding", "scale_embedding"),
)
"""Settings of the block that the original does not have: its models have their defaults."""


def original_config(options: Mapping[str, Any], *, origin: str) -> ModelConfig:
    """Convert constructor arguments of the paper's code. Raises ConfigError naming the argument."""
    shared = _shared_fields(options, origin=origin)
    shared["vocab_size"] = _required(options, "n_token", origin=origin)
    shared["tie_weight"] = options.get("tie_weight", True)
    return checked_config(shared, origin=origin)


def transformers_config(options: Mapping[str, Any], *, origin: str) -> ModelConfig:
    """Convert a `TransfoXLConfig`. Raises ConfigError naming the option."""
    if (kind := options.get("model_type")) != "transfo-xl":
        raise ConfigError(f"{origin}: model_type is {kind!r}; only 'transfo-xl' can be imported")
    if (epsilon := options.get("layer_norm_epsilon", 1e-5)) != 1e-5:
        raise ConfigError(f"{origin}: layer_norm_epsilon={epsilon}; this model uses 1e-05")
    shared = _shared_fields(options, origin=origin)
    name = "n_token" if "n_token" in options and "vocab_size" not in options else "vocab_size"
    shared["vocab_size"] = _required(options, name, origin=origin)
    # Files written before transformers 3 have the original's name for this option.
    shared["tie_weight"] = options.get("tie_word_embeddings", options.get("tie_weight", True))
    # transformers writes every option, and its defaults differ from the original's. If one is
    # missing, neither default can be assumed.
    for name in ("untie_r", "same_length", "pre_lnorm", "div_val", "cutoffs", "d_embed"):
        shared[name] = _required(options, name, origin=origin)
    for name in ("clamp_len", *(["tie_projs"] if "tie_projs" in shared else [])):
        _required(options, name, origin=origin)
    return checked_config(shared, origin=origin)


def _shared_fields(options: Mapping[str, Any], *, origin: str) -> dict[str, Any]:
    if (kind := options.get("attn_type", 0)) != 0:
        raise ConfigError(
            f"{origin}: attn_type={kind!r} is not supported; only 0, the relative "
            "positions of Dai et al. 2019"
        )
    for name in BLOCK_SETTINGS:
        if name in options:
            raise ConfigError(
                f"{origin}: {name}={options[name]!r} is no option of these programs, so its block "
                "is not theirs; a model of txl export needs no import"
            )
    values = {name: _required(options, name, origin=origin) for name in _SAME_NAME}
    values |= {name: options[name] for name in _SAME_NAME_OPTIONAL if name in options}
    clamp_len = options.get("clamp_len", -1)
    if clamp_len is None or (type(clamp_len) is int and clamp_len <= 0):
        clamp_len = None  # in both programs -1 and 0 mean "not clamped"
    values["clamp_len"] = clamp_len
    width = values.get("d_embed")
    if values.get("div_val", 1) != 1 or width not in (None, values["d_model"]):
        # Only here: without projections, both programs ignore tie_projs but still write it.
        values["tie_projs"] = options.get("tie_projs", [False])
    return values


def _required(options: Mapping[str, Any], name: str, *, origin: str) -> Any:
    if name not in options:
        raise ConfigError(
            f"{origin}: {name} is missing; without it the shapes of the model are unknown"
        )
    return options[name]


_BUFFERS = ("pos_emb.inv_freq",)
"""Constants that the original saves with its parameters. This model computes them."""


def model_from_original(
    tensors: Mapping[str, object],
    config: ModelConfig,
    *,
    origin: str,
    clusters_reversed: bool,
) -> TransformerXL:
    """Build the model from tensors with the original's names.

    A tied tensor may be present under one or all of its names. Raises CheckpointError naming a
    tensor that is missing, unknown, not finite, of the wrong shape, or tied to a different one, and
    ConfigError naming a setting that the original does not have.
    """
    model = empty_model(config, origin=origin, num_tensors=len(tensors))
    try:
        expected = to_original(model.state_dict(), config)
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}") from None
    tied = _tied_names(config)
    parameters = {name: tensor for name, tensor in tensors.items() if name not in _BUFFERS}
    for other, name in tied.items():
        if other in parameters:  # some writers store only one of the two, not always the same
            parameters.setdefault(name, parameters[other])
            expected[other] = expected[name]
    checked = check_tensors(parameters, expected, origin=origin)
    for other, name in tied.items():
        if other in checked and not torch.equal(checked[other], checked[name]):
            raise CheckpointError(
                f"{origin}: {other} differs from {name}, but the config ties them; "
                "correct tie_weight, tie_projs or untie_r there"
            )
    return assign_weights(
        model, from_original(checked, config, clusters_reversed=clusters_reversed)
    )


def _tied_names(config: ModelConfig) -> dict[str, str]:
    """Second name of a tied tensor -> its first name, which `from_original` reads."""
    names = {}
    if config.tie_weight:
        for table in range(len(config.table_bounds)):
            names[f"crit.out_layers.{table}.weight"] = f"word_emb.emb_layers.{table}.weight"
    # With div_val > 1 every cluster has its own projection; else all clusters use the first.
    for cluster in range(config.num_clusters):
        if config.has_projection and config.is_tied(cluster):
            table = cluster if config.div_val > 1 else 0
            names[f"crit.out_projs.{cluster}"] = f"word_emb.emb_projs.{table}"
    if not config.untie_r:
        for bias in ("r_w_bias", "r_r_bias"):
            names |= {f"layers.{i}.dec_attn.{bias}": bias for i in range(config.n_layer)}
    return names


# --- names of tensors -----------------------------------------------------------------------------

_LAYER_NAMES = {
    "dec_attn.o_net.weight": "attention.out.weight",
    "dec_attn.r_net.weight": "attention.distances.project.weight",
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
"""One row per cluster; the original's first row is the last cluster."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows [start, stop) of one of our tensors; stop None means all."""

    name: str
    start: int = 0
    stop: int | None = None


def _require_original(config: ModelConfig) -> None:
    """Raise ValueError for a model whose function the original's weights do not describe."""
    defaults = ModelConfig()
    for name in BLOCK_SETTINGS:
        if (value := getattr(config, name)) != (default := getattr(defaults, name)):
            raise ValueError(f"{name}={value!r}: models of the original have {default!r}")


def _originals(config: ModelConfig) -> dict[str, tuple[_Rows, ...]]:
    """Original name -> our rows, which are concatenated in the original's tensor."""
    names = _ends(config)
    if config.shares_biases:
        names |= {name: (_Rows(ours),) for name, ours in _BIASES.items()}
    width = config.n_head * config.d_head
    for layer in range(config.n_layer):
        prefix = f"layers.{layer}."
        names |= {prefix + name: (_Rows(prefix + ours),) for name, ours in _LAYER_NAMES.items()}
        if config.untie_r:  # an option of transformers
            for name, ours in _BIASES.items():
                names[f"{prefix}dec_attn.{name}"] = (_Rows(f"{prefix}attention.distances.{ours}"),)
        # Queries come first in the original's tensor, then keys, then values.
        query = _Rows(prefix + "attention.query.weight", 0, width)
        key_value = _Rows(prefix + "attention.key_value.weight", 0, 2 * width)
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
    return named
