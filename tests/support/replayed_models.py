"""Models of other programs, with the numbers that these programs computed for them.

They are in this repository, or in the directories that `TXL_GOLDEN_DIR` and `TXL_HF_DIR` name. The
tests read every model in such a directory, with any name and sizes.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

OWN_GOLDEN = Path(__file__).parents[1] / "golden"
OWN_HF = Path(__file__).parents[1] / "hf-transfo-xl"
"""The repository's models, for tests that damage one or depend on its content."""


def golden_files() -> list[Path]:
    """Every .npz of the original: state dict, constructor arguments and numbers."""
    return _models("TXL_GOLDEN_DIR", OWN_GOLDEN, "*.npz")


def hf_directories() -> list[Path]:
    """Every model saved by transformers: the directory itself, or its subdirectories."""
    return [path.parent for path in _models("TXL_HF_DIR", OWN_HF, "config.json", "*/config.json")]


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def original_arguments(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as file:
        return json.loads(str(file["config_json"]))


def num_segments(arrays: Iterable[str]) -> int:
    return sum(key.startswith("input/") for key in arrays)


def _models(variable: str, own: Path, *patterns: str) -> list[Path]:
    """The files of the first pattern that the directory has."""
    directory = Path(os.environ.get(variable, own))
    for pattern in patterns:
        if found := sorted(directory.glob(pattern)):
            return found
    pytest.fail(
        f"{variable} is {directory}, which has no {' or '.join(patterns)}. Set it to a directory "
        "of models, or unset it for the repository's models",
        pytrace=False,
    )
