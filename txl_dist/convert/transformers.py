"""Reads a TransfoXL directory saved by transformers: config.json and one file of weights.

Reads model.safetensors if it exists, else pytorch_model.bin, a pickle that torch loads without
running code from it (`weights_only`). The transformers package is not needed. Unlike the original,
transformers counts the clusters of the adaptive softmax forwards (docs/decisions/0007).
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

from txl_dist.convert.architecture import read_json, transformers_config
from txl_dist.convert.tensors import model_from_original
from txl_dist.errors import CheckpointError
from txl_dist.model.transformer_xl import TransformerXL

_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"
_PREFIX = "transformer."


def read_transformers(directory: Path) -> TransformerXL:
    """The model, on the CPU in fp32.

    Raises CheckpointError naming the invalid tensor, ConfigError for an invalid config.
    """
    config_path = directory / "config.json"
    config = transformers_config(read_json(config_path), origin=str(config_path))
    path, stored = _read_weights(directory)
    tensors = {}
    for name, tensor in stored.items():
        if not name.startswith((_PREFIX, "crit.")):
            raise CheckpointError(
                f"{path} has a tensor {name[:80]!r}; expected {_PREFIX}... and crit...., as "
                "TransfoXLLMHeadModel.save_pretrained writes them"
            )
        tensors[name.removeprefix(_PREFIX)] = tensor
    return model_from_original(tensors, config, origin=str(path), clusters_reversed=False)


def _read_weights(directory: Path) -> tuple[Path, dict[str, object]]:
    safe, pickled = directory / _SAFE, directory / _PICKLED
    path = safe if safe.is_file() else pickled
    if not path.is_file():
        raise CheckpointError(
            f"{directory} has neither {_SAFE} nor {_PICKLED}; save the model again in one file: "
            "model.save_pretrained(DIR, max_shard_size='100GB')"
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
