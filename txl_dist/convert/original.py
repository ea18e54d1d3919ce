"""Reads a state dict of the paper's code, as .npz.

The original saves whole pickled models, which no one should load from a stranger. Beside it, once:

    numpy.savez("wt103.npz", config_json=json.dumps(constructor_arguments),
                **{name: t.numpy() for name, t in model.state_dict().items()})

Names may carry the prefix `sd/`; then everything without it is left alone. The constructor's
arguments may also stand in a file of the same name that ends in .json.
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

    Raises CheckpointError naming the tensor that is wrong, ConfigError for arguments that no model
    can have.
    """
    arrays = _read_arrays(path)
    given = _read_arguments(path, arrays.pop(_CONFIG, None))
    config = original_config(given, where=f"{path}, {_CONFIG}")
    tensors = {
        name: torch.from_numpy(array.astype(np.float32)) if array.dtype.kind == "f" else array
        for name, array in arrays.items()
    }
    return model_from_original(tensors, config, where=str(path), clusters_reversed=True)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """State dict and config, names without prefix."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, NpzFile):
                raise CheckpointError(f"{path} is a single array, not an .npz of a state dict")
            prefix = _PREFIX if any(name.startswith(_PREFIX) for name in file.files) else ""
            return {
                name if name == _CONFIG else name.removeprefix(prefix): file[name]
                for name in file.files
                if name.startswith(prefix) or name == _CONFIG
            }
    except CheckpointError:
        raise
    # Whatever a damaged or hostile archive sets off in zipfile, zlib or numpy.
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as .npz of plain arrays ({type(error).__name__}: {error}). "
            "Save it again with numpy.savez, arrays of numbers only"
        ) from None


def _read_arguments(path: Path, inside: np.ndarray | None) -> dict[str, Any]:
    if inside is not None:
        return parse_json(str(inside), where=f"{path}, {_CONFIG}")
    beside = path.with_suffix(".json")
    if not beside.is_file():
        raise ConfigError(
            f"{path} does not say its architecture: write the constructor's arguments (n_token, "
            f"n_layer, ...) as a JSON object to {beside}, or save them inside as {_CONFIG}"
        )
    return read_json(beside)
