"""Foreign files to read and to spoil, and commands on them."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typer.testing import CliRunner

from txl_dist.cli.app import app
from txl_dist.errors import TxlError

HF = Path(os.environ.get("TXL_HF_DIR", Path(__file__).parents[2] / "hf-transfo-xl"))
"""Saved by transformers 4.35.2, and the nats it computes with it."""
GOLDEN = Path(os.environ.get("TXL_GOLDEN_DIR", Path(__file__).parents[2] / "golden"))
"""State dicts of the original, and the nats it computes with them."""


def run_txl(*words: object) -> tuple[int, str]:
    """Exit code and message of a command, run in this process."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, TxlError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, result.output


def hf_copy(folder: Path, *, config: dict[str, Any] | None = None) -> Path:
    """A directory to spoil, with options of its config changed."""
    folder.mkdir()
    given = json.loads((HF / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(given | (config or {})))
    shutil.copyfile(HF / "pytorch_model.bin", folder / "pytorch_model.bin")
    return folder


def hf_weights() -> dict[str, Tensor]:
    return torch.load(HF / "pytorch_model.bin", weights_only=True)


def golden_arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file.files}
