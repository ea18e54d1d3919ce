"""Checks of a model that comes from a file: its JSON, its config and its tensors.

Every name, shape and value is checked before there is a model, so a wrong or damaged file ends with
the name of what is wrong. It knows no format; those of other programs use it, and ours.
"""

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from data_pipeline.system.strict import first_problem
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
"""In every directory of a model, ours and those of transformers."""


def parse_json(text: str | bytes, *, origin: str) -> dict[str, Any]:
    """Parse a JSON object. Raises CheckpointError for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{origin} is not valid JSON ({error}); it is damaged") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{origin} must hold a JSON object, found {type(value).__name__}")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Read a file with one JSON object. Raises CheckpointError."""
    try:
        return parse_json(path.read_bytes(), origin=str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None


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
    check_names(tensors.keys(), expected.keys(), origin=origin)
    return {
        name: checked_tensor(tensors[name], expected[name], origin=f"{origin}: {name}")
        for name in expected
    }


def check_names(names: Set[str], expected: Set[str], *, origin: str) -> None:
    """Raises CheckpointError that lists the tensors that are missing or unknown."""
    differences = {
        "misses": expected - names,
        "has tensors unknown to this architecture:": names - expected,
    }
    problems = []
    for problem, some in differences.items():
        if some:
            more = f" and {len(some) - 8} more" if len(some) > 8 else ""
            problems.append(f"{problem} {', '.join(sorted(some)[:8])}{more}")
    if problems:
        raise CheckpointError(
            f"{origin} {' and '.join(problems)}; the config is not that of these weights"
        )


def checked_tensor(tensor: object, expected: Tensor, *, origin: str) -> Tensor:
    """The tensor in fp32. Raises CheckpointError for another shape or kind, and for NaN."""
    # Another layout can come from a pickle, and the checks below would fail on it.
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        raise CheckpointError(f"{origin} is {tensor!r:.40}, expected a dense tensor")
    if tensor.shape != expected.shape:
        raise CheckpointError(
            f"{origin} has shape {tuple(tensor.shape)}, the config says {tuple(expected.shape)}"
        )
    if not tensor.is_floating_point():
        raise CheckpointError(f"{origin} is {tensor.dtype}, expected floating-point numbers")
    # fp32 for every format: fp16 and bf16 convert exactly, and parameters are trained in fp32.
    tensor = tensor.detach().to(torch.float32)
    # Two numbers first: a mask of every value of a large table takes as much memory as it.
    if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
        num_bad = int((~tensor.isfinite()).sum())
        raise CheckpointError(
            f"{origin} is NaN or Inf in {num_bad:,} of {tensor.numel():,} values; the model it "
            "was saved from had diverged, or the file is damaged"
        )
    return tensor
