"""Reads a TransfoXL directory as transformers saves it: config.json and one file of weights.

model.safetensors is taken if there is one, else pytorch_model.bin, a pickle that torch reads
without running what it names (`weights_only`). transformers itself is not needed; it counts the
clusters of the adaptive softmax forwards, unlike the original.
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

    Raises CheckpointError naming the tensor that is wrong, ConfigError for a config that no model
    can have.
    """
    where = directory / "config.json"
    config = transformers_config(read_json(where), where=str(where))
    path, found = _read_weights(directory)
    tensors = {}
    for name, tensor in found.items():
        if not name.startswith((_PREFIX, "crit.")):
            raise CheckpointError(
                f"{path} holds {name[:80]!r}; expected {_PREFIX}... and crit...., as "
                "TransfoXLLMHeadModel.save_pretrained writes them"
            )
        tensors[name.removeprefix(_PREFIX)] = tensor
    return model_from_original(tensors, config, where=str(path), clusters_reversed=False)


def _read_weights(directory: Path) -> tuple[Path, dict[str, object]]:
    safe, pickled = directory / _SAFE, directory / _PICKLED
    path = safe if safe.is_file() else pickled
    if not path.is_file():
        raise CheckpointError(
            f"{directory} holds neither {_SAFE} nor {_PICKLED}; save the model again in one file: "
            "model.save_pretrained(DIR, max_shard_size='100GB')"
        )
    try:
        if path == safe:
            return path, dict(load_file(path))
        found = torch.load(path, map_location="cpu", weights_only=True)
    # Whatever a damaged or hostile file sets off; a pickle that names code ends here, unrun.
    except Exception as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0][:200]
        raise CheckpointError(
            f"{path} cannot be read as plain tensors ({type(error).__name__}: {reason}). It is "
            "damaged, or it holds code, which is never run; have it saved again as safetensors"
        ) from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise CheckpointError(f"{path} holds no state dict but {type(found).__name__}")
    return path, found
