"""Reads a state dict of the paper's code from an .npz file.

The original saves whole pickled models, and loading a pickle can run any code. Convert one that you
trust, in an environment with the original's code:

    numpy.savez("wt103.npz", config_json=json.dumps(constructor_arguments),
                **{name: t.numpy() for name, t in model.state_dict().items()})

Names may have the prefix `sd/`; then arrays without it are ignored. Instead of `config_json`, the
constructor's arguments may be in a file of the same name with the suffix .json.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.npyio import NpzFile

from txl_dist.convert.architecture import original_config, parse_json, read_json
from txl_dist.convert.tensors import model_from_original
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.model.transformer_xl import TransformerXL

_CONFIG = "config_json"
_PREFIX = "sd/"


def read_original(path: Path) -> TransformerXL:
    """The model, on the CPU in fp32.

    Raises CheckpointError naming the invalid tensor, ConfigError for invalid arguments.
    """
    arrays = _read_arrays(path)
    arguments = _read_arguments(path, arrays.pop(_CONFIG, None))
    config = original_config(arguments, origin=f"{path}, {_CONFIG}")
    tensors = {
        name: torch.from_numpy(array.astype(np.float32)) if array.dtype.kind == "f" else array
        for name, array in arrays.items()
    }
    return model_from_original(tensors, config, origin=str(path), clusters_reversed=True)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """State dict and config; names without the prefix."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, NpzFile):
                raise CheckpointError(f"{path} is a single array, not an .npz of a state dict")
            # Files with the prefix also have recorded inputs and outputs, for tests.
            prefix = _PREFIX if any(name.startswith(_PREFIX) for name in file.files) else ""
            return {
                name if name == _CONFIG else name.removeprefix(prefix): file[name]
                for name in file.files
                if name.startswith(prefix) or name == _CONFIG
            }
    except CheckpointError:
        raise
    # zipfile, zlib and numpy raise many classes for a damaged or malicious archive.
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as an .npz of plain arrays ({type(error).__name__}: {error}). "
            "Save it again with numpy.savez, arrays of numbers only"
        ) from None


def _read_arguments(path: Path, config_json: np.ndarray | None) -> dict[str, Any]:
    if config_json is not None:
        return parse_json(str(config_json), origin=f"{path}, {_CONFIG}")
    json_path = path.with_suffix(".json")
    if not json_path.is_file():
        raise ConfigError(
            f"{path} has no architecture: write the constructor's arguments (n_token, n_layer, "
            f"...) as a JSON object to {json_path}, or save them in the .npz as {_CONFIG}"
        )
    return read_json(json_path)
