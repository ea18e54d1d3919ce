"""The architecture in foreign words: JSON of the paper's code and its descendants to ModelConfig.

Only what decides the function is taken; options of their training and evaluation loops are left.
Facts: the constructor of `MemTransformerLM` (the paper's code) and transformers' `TransfoXLConfig`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.model.config import ModelConfig

MAX_JSON_BYTES = 16 * 2**20
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


def parse_json(text: str | bytes, *, where: str) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError for anything else."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON ({error}); it is damaged") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must hold a JSON object, found {type(value).__name__}")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} is larger than {MAX_JSON_BYTES:,} bytes: no model's config")
    return parse_json(data, where=str(path))


def original_config(given: Mapping[str, Any], *, where: str) -> ModelConfig:
    """From constructor arguments of the paper's code. Raises ConfigError naming the argument."""
    shared = _shared_fields(given, where=where)
    shared["vocab_size"] = _required(given, "n_token", where=where)
    shared["tie_weight"] = given.get("tie_weight", True)
    return checked_config(shared, where=where)


def transformers_config(given: Mapping[str, Any], *, where: str) -> ModelConfig:
    """From a `TransfoXLConfig`. Raises ConfigError naming the option."""
    if (kind := given.get("model_type")) != "transfo-xl":
        raise ConfigError(f"{where}: model_type is {kind!r}; only 'transfo-xl' can be imported")
    if (epsilon := given.get("layer_norm_epsilon", 1e-5)) != 1e-5:
        raise ConfigError(f"{where}: layer_norm_epsilon={epsilon}; this model's norms have 1e-05")
    shared = _shared_fields(given, where=where)
    name = "n_token" if "n_token" in given and "vocab_size" not in given else "vocab_size"
    shared["vocab_size"] = _required(given, name, where=where)
    # Files written before transformers 3 have the original's name for it.
    shared["tie_weight"] = given.get("tie_word_embeddings", given.get("tie_weight", True))
    # It writes every option, whose defaults differ from the original's: without one, no guess.
    for name in ("untie_r", "same_length", "pre_lnorm", "div_val", "cutoffs", "d_embed"):
        shared[name] = _required(given, name, where=where)
    for name in ("clamp_len", *(["tie_projs"] if "tie_projs" in shared else [])):
        _required(given, name, where=where)
    return checked_config(shared, where=where)


def checked_config(values: Mapping[str, Any], *, where: str) -> ModelConfig:
    """A ModelConfig of parsed JSON. Raises ConfigError saying what no model can have."""
    try:
        config = TypeAdapter(ModelConfig).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in found["loc"])
        message = str(found["msg"]).removeprefix("Value error, ")
        raise ConfigError(f"{where}: {f'{name}: ' if name else ''}{message}") from None
    if config.vocab_size < 1:
        raise ConfigError(f"{where}: the vocabulary's size is {config.vocab_size}; 1 at least")
    return config


def _shared_fields(given: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    if (kind := given.get("attn_type", 0)) != 0:
        raise ConfigError(
            f"{where}: attn_type={kind!r} is another attention; this model has 0, relative "
            "positions after Dai et al. 2019"
        )
    values = {name: _required(given, name, where=where) for name in _SAME_NAME}
    values |= {name: given[name] for name in _SAME_NAME_OPTIONAL if name in given}
    clamp_len = given.get("clamp_len", -1)
    if clamp_len is None or (type(clamp_len) is int and clamp_len <= 0):
        clamp_len = None  # what -1 and 0 mean to them
    values["clamp_len"] = clamp_len
    width = values.get("d_embed")
    if values.get("div_val", 1) != 1 or width not in (None, values["d_model"]):
        # Without projections they ignore it, and write it all the same.
        values["tie_projs"] = given.get("tie_projs", [False])
    return values


def _required(given: Mapping[str, Any], name: str, *, where: str) -> Any:
    if name not in given:
        raise ConfigError(f"{where}: {name} is missing; a model of unknown shape cannot be read")
    return given[name]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
