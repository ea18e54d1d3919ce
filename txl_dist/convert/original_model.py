"""Models of other programs, for `txl import`: recognises their format and reads the paper's models.

.npz       a state dict of the paper's code. The original saves whole pickled models, and loading a
           pickle can run any code. Convert one that you trust, in an environment with that code:

               numpy.savez("wt103.npz", config_json=json.dumps(constructor_arguments),
                           **{name: t.numpy() for name, t in model.state_dict().items()})

           Names may have the prefix `sd/`; then arrays without it are ignored.
directory  of transformers: config.json, and model.safetensors or pytorch_model.bin, a pickle that
           torch loads without running code from it (`weights_only`). Other models than TransfoXL
           are in llama_family.py.

Configs are JSON, constructor arguments or a `TransfoXLConfig`; only the options that determine the
model's function are read. Weights: the original has one matrix for queries, keys and values, splits
the softmax's bias by cluster, stores the clusters' columns in reverse (transformers does not,
docs/decisions/0007), and repeats tied tensors under two names. The conversion of names works on any
tensors of these shapes, including gradients: the golden tests use it, too.

Source: the constructor of `MemTransformerLM` (the paper's code), and `TransfoXLConfig`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from data_pipeline.system.path_kind import PathKind, kind_of
from data_pipeline.tokenizers import Tokenizer
from txl_dist.convert import FORMATS, require_source
from txl_dist.convert.checks import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    assign_weights,
    check_tensors,
    checked_config,
    empty_model,
    parse_json,
    read_json,
)
from txl_dist.convert.llama_family import is_family
from txl_dist.convert.stored_model import (
    DEFAULT_READING,
    FAMILY_READING,
    FORMAT,
    Reading,
    find_model,
)
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL


@dataclass(frozen=True, slots=True)
class ForeignModel:
    """What a source has, with the name of its format."""

    model: TransformerXL
    format: str
    tokenizer: Tokenizer | None = None
    reading: Reading = DEFAULT_READING


def read_model(source: Path) -> ForeignModel:
    """The model of another program.

    Raises CheckpointError for invalid files, ConfigError for an invalid config.
    """
    require_source(source)
    if source.is_file() and source.suffix == ".npz":
        return ForeignModel(read_original(source), "original")
    if (source / CONFIG_NAME).is_file():
        options = read_json(source / CONFIG_NAME)
        if is_family(options):
            stored = find_model(source)
            model, tokenizer = stored.load(stored.config)
            return ForeignModel(model, str(options["model_type"]), tokenizer, FAMILY_READING)
        if options.get("format") == FORMAT:
            raise ConfigError(
                f"{source} is a model of txl export, which needs no import: txl eval {source} "
                f"DATA, txl generate {source} --prompt TEXT"
            )
        return ForeignModel(read_transformers(source), "transformers")
    kind = kind_of(source)
    hint = f". To write its model: txl export {source} --out PATH"
    has_model = kind in (PathKind.RUN, PathKind.CHECKPOINT)
    raise CheckpointError(f"{source} is {kind}, not a model to import; {FORMATS}{hint * has_model}")


_CONFIG = "config_json"
_STATE_PREFIX = "sd/"


def read_original(path: Path) -> TransformerXL:
    """The model, on the CPU in fp32.

    Raises CheckpointError naming the invalid tensor, ConfigError for invalid arguments.
    """
    arrays = _read_arrays(path)
    if _CONFIG not in arrays:
        raise ConfigError(
            f"{path} has no architecture: save the constructor's arguments (n_token, n_layer, ...) "
            f"in it, as a JSON object of the name {_CONFIG}"
        )
    origin = f"{path}, {_CONFIG}"
    arguments = parse_json(str(arrays.pop(_CONFIG)), origin=origin)
    config = original_config(arguments, origin=origin)
    tensors = {
        name: torch.from_numpy(array.astype(np.float32)) if array.dtype.kind == "f" else array
        for name, array in arrays.items()
    }
    return model_from_original(tensors, config, origin=str(path), clusters_reversed=True)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """State dict and config; names without the prefix."""
    try:
        with np.load(path, allow_pickle=False) as file:
            # Files with the prefix also have recorded inputs and outputs, for tests.
            prefix = (
                _STATE_PREFIX if any(name.startswith(_STATE_PREFIX) for name in file.files) else ""
            )
            return {
                name if name == _CONFIG else name.removeprefix(prefix): file[name]
                for name in file.files
                if name.startswith(prefix) or name == _CONFIG
            }
    # zipfile, zlib and numpy raise many classes for a damaged or malicious archive.
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as an .npz of plain arrays ({type(error).__name__}: {error}). "
            "Save it again with numpy.savez, arrays of numbers only"
        ) from None


_PICKLED = "pytorch_model.bin"
_MODEL_PREFIX = "transformer."


def read_transformers(directory: Path) -> TransformerXL:
    """The model, on the CPU in fp32.

    Raises CheckpointError naming the invalid tensor, ConfigError for an invalid config.
    """
    config_path = directory / CONFIG_NAME
    config = transformers_config(read_json(config_path), origin=str(config_path))
    path, stored = _read_weights(directory)
    tensors = {}
    for name, tensor in stored.items():
        if not name.startswith((_MODEL_PREFIX, "crit.")):
            raise CheckpointError(
                f"{path} has a tensor {name[:80]!r}; expected {_MODEL_PREFIX}... and crit...., as "
                "TransfoXLLMHeadModel.save_pretrained writes them"
            )
        tensors[name.removeprefix(_MODEL_PREFIX)] = tensor
    return model_from_original(tensors, config, origin=str(path), clusters_reversed=False)


def _read_weights(directory: Path) -> tuple[Path, dict[str, object]]:
    safe = directory / WEIGHTS_NAME
    path = safe if safe.is_file() else directory / _PICKLED
    if not path.is_file():
        raise CheckpointError(
            f"{directory} has neither {WEIGHTS_NAME} nor {_PICKLED}; save the model again in one "
            "file: model.save_pretrained(DIR, max_shard_size='100GB')"
        )
    try:
        if path == safe:
            return path, dict(load_file(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    # Damaged files raise many classes. A pickle with code raises too, before the code has run.
    except Exception as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0][:200]
        raise CheckpointError(
            f"{path} cannot be read as plain tensors ({type(error).__name__}: {reason}). It is "
            "damaged, or contains code, which is never run; it has to be saved again as safetensors"
        ) from None
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{path} has {type(state).__name__}, expected a state dict")
    return path, state


# --- configs and tensors of the paper's models ----------------------------------------------------

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
    shared = _shared_fields(options, origin=origin)
    shared["norm_epsilon"] = options.get("layer_norm_epsilon", 1e-5)
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
