"""Converts the JSON config of the paper's code or of transformers into a ModelConfig.

Reads only the options that determine the model's function, not those of training or evaluation.
Source: the constructor of `MemTransformerLM` (the paper's code), and `TransfoXLConfig`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.model.config import ModelConfig

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
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        message = str(first["msg"]).removeprefix("Value error, ")
        raise ConfigError(f"{origin}: {f'{name}: ' if name else ''}{message}") from None
    if config.vocab_size < 1:
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
