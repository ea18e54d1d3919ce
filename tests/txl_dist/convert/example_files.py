"""Foreign files to read and to spoil, and commands on them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typer.testing import CliRunner

from tests.support.replayed_models import OWN_GOLDEN, OWN_HF, read_arrays
from txl_dist.cli.app import app
from txl_dist.errors import TxlError


def run_txl(*words: object) -> tuple[int, str]:
    """Exit code and message of a command, run in this process."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, TxlError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, result.output


def hf_copy(folder: Path, *, config: dict[str, Any] | None = None, source: Path = OWN_HF) -> Path:
    """A directory to spoil, with options of its config changed."""
    folder.mkdir()
    given = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(given | (config or {})))
    shutil.copyfile(source / "pytorch_model.bin", folder / "pytorch_model.bin")
    return folder


def hf_weights() -> dict[str, Tensor]:
    return torch.load(OWN_HF / "pytorch_model.bin", weights_only=True)


def golden_arrays(name: str) -> dict[str, np.ndarray]:
    return read_arrays(OWN_GOLDEN / f"{name}.npz")
