"""Converts configs and tensors of other programs, after checking every name, shape and value.

Configs are the JSON of the paper's code or of transformers; only the options that determine the
model's function are read. Tensors have the original's names (original_weights.py).
Source: the constructor of `MemTransformerLM` (the paper's code), and `TransfoXLConfig`.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from data_pipeline.system.strict import first_problem
from txl_dist.convert.original_weights import BLOCK_SETTINGS, from_original, to_original
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


MAX_CONFIG_BYTES = 16 * 2**20


def parse_json(text: str | bytes, *, origin: str) -> dict[str, Any]:
    """Parse a JSON object. Raises CheckpointError for anything else."""
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{origin} is not valid JSON ({error}); it is damaged") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{origin} must hold a JSON object, found {type(value).__name__}")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Read a file with one JSON object. Raises CheckpointError."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_CONFIG_BYTES:,} bytes: not a config")
        return parse_json(path.read_bytes(), origin=str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None


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


def checked_config(values: Mapping[str, Any], *, origin: str) -> ModelConfig:
    """Build a ModelConfig from parsed JSON. Raises ConfigError naming the invalid field."""
    try:
        config = TypeAdapter(ModelConfig).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {first_problem(error)}") from None
    if config.num_ids < 1:
        raise ConfigError(
            f"{origin}: the vocabulary size is {config.vocab_size}; expected at least 1"
        )
    return config


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


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


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


def empty_model(config: ModelConfig, *, origin: str, num_tensors: int) -> TransformerXL:
    """A model on the meta device: an absurd config is rejected before it takes memory.

    Raises ConfigError if a model with this config cannot consist of `num_tensors` tensors.
    """
    # A meta tensor takes no memory, but a module does: 10^9 layers would not fit.
    if config.n_layer > num_tensors:
        raise ConfigError(f"{origin}: n_layer={config.n_layer}, but only {num_tensors} tensors")
    try:
        with torch.device("meta"):
            return TransformerXL(config)
    except RuntimeError as error:  # sizes that overflow 64 bits
        raise ConfigError(f"{origin}: no model can have this config: {error}") from None


def assign_weights(model: TransformerXL, weights: Mapping[str, Tensor]) -> TransformerXL:
    """Make `weights` the parameters of a model on the meta device, without a copy.

    The model is in evaluation mode, as other libraries return models that they load.
    """
    model.load_state_dict(weights, assign=True)
    return model.eval()


def check_tensors(
    tensors: Mapping[str, object], expected: Mapping[str, Tensor], *, origin: str
) -> dict[str, Tensor]:
    """The tensors in fp32. Raises CheckpointError unless names and shapes are those of `expected`
    and all values are finite.
    """
    differences = {
        "misses": expected.keys() - tensors.keys(),
        "has tensors unknown to this architecture:": tensors.keys() - expected.keys(),
    }
    problems = [f"{problem} {_list(names)}" for problem, names in differences.items() if names]
    if problems:
        raise CheckpointError(
            f"{origin} {' and '.join(problems)}; the config is not that of these weights"
        )
    return {
        name: _checked(tensors[name], expected[name], origin=f"{origin}: {name}")
        for name in expected
    }


def _checked(tensor: object, expected: Tensor, *, origin: str) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{origin} is {type(tensor).__name__}, expected a tensor")
    if tensor.shape != expected.shape:
        raise CheckpointError(
            f"{origin} has shape {tuple(tensor.shape)}, the config says {tuple(expected.shape)}"
        )
    # Another layout or device (meta) can come from a pickle, and the checks below would fail on it.
    dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not (dense and tensor.is_floating_point()):
        raise CheckpointError(f"{origin} is {tensor.dtype}, {tensor.layout}; expected dense floats")
    # fp32 for every format: fp16 and bf16 convert exactly, and parameters are trained in fp32.
    tensor = tensor.detach().to(torch.float32)
    if num_bad := int((~tensor.isfinite()).sum()):
        raise CheckpointError(
            f"{origin} is NaN or Inf in {num_bad:,} of {tensor.numel():,} values; the model it "
            "was saved from had diverged, or the file is damaged"
        )
    return tensor


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


def _list(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
