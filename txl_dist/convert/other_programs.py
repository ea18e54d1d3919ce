"""Models of other programs, for `txl import`: recognises their format and reads their tensors.

.npz       a state dict of the paper's code. The original saves whole pickled models, and loading a
           pickle can run any code. Convert one that you trust, in an environment with that code:

               numpy.savez("wt103.npz", config_json=json.dumps(constructor_arguments),
                           **{name: t.numpy() for name, t in model.state_dict().items()})

           Names may have the prefix `sd/`; then arrays without it are ignored.
directory  of transformers: config.json, and model.safetensors or pytorch_model.bin, a pickle that
           torch loads without running code from it (`weights_only`). Unlike the original, it counts
           the clusters of the adaptive softmax forwards (docs/decisions/0007). Other models of
           transformers are in llama_family.py.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from data_pipeline.tokenizers import Tokenizer
from txl_dist.convert import FORMATS, require_source
from txl_dist.convert.checks import CONFIG_NAME, WEIGHTS_NAME, parse_json, read_json
from txl_dist.convert.llama_family import is_family
from txl_dist.convert.original_model import (
    model_from_original,
    original_config,
    transformers_config,
)
from txl_dist.convert.stored_model import (
    DEFAULT_READING,
    FAMILY_READING,
    FORMAT,
    Reading,
    find_model,
)
from txl_dist.errors import CheckpointError, ConfigError
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
    hint = ""
    if any((source / name).exists() for name in ("checkpoints", "manifest.json")):
        hint = f". This looks like a run or a checkpoint: txl export {source} --out PATH"
    raise CheckpointError(f"the format of {source} is unknown; {FORMATS}{hint}")


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
    safe, pickled = directory / WEIGHTS_NAME, directory / _PICKLED
    path = safe if safe.is_file() else pickled
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
