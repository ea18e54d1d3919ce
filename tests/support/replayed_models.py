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
    directory = _directory("TXL_GOLDEN_DIR", OWN_GOLDEN)
    return _or_fail(sorted(directory.glob("*.npz")), "TXL_GOLDEN_DIR", directory, "no *.npz")


def hf_directories() -> list[Path]:
    """Every model saved by transformers: the directory itself, or its subdirectories."""
    directory = _directory("TXL_HF_DIR", OWN_HF)
    if (directory / "config.json").exists():
        return [directory]
    inside = [path for path in sorted(directory.iterdir()) if path.is_dir()]
    missing = "neither config.json nor directories"
    return _or_fail(inside, "TXL_HF_DIR", directory, missing)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz."""
    with np.load(path, allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def original_arguments(path: Path) -> dict[str, Any]:
    """The constructor arguments of a golden file's model."""
    with np.load(path, allow_pickle=False) as file:
        return json.loads(str(file["config_json"]))


def num_segments(arrays: Iterable[str]) -> int:
    """The number of consecutive segments in a golden file."""
    return sum(key.startswith("input/") for key in arrays)


def _directory(variable: str, own: Path) -> Path:
    directory = Path(os.environ.get(variable, own))
    return directory if directory.is_dir() else _fail(variable, directory, "no such directory")


def _or_fail(paths: list[Path], variable: str, directory: Path, missing: str) -> list[Path]:
    return paths or _fail(variable, directory, missing)


def _fail(variable: str, directory: Path, problem: str) -> Any:
    pytest.fail(
        f"{variable} is {directory}: {problem}. Set it to a directory of models, or unset "
        f"it for the repository's models",
        pytrace=False,
    )
