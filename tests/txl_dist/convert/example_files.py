"""Files of other programs to read and to damage, and commands on them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_pipeline.tokenizers import Tokenizer
from tests.support.replayed_models import OWN_GOLDEN, OWN_HF, read_arrays
from txl_dist.convert.stored_model import find_model
from txl_dist.model.transformer_xl import TransformerXL


def load(directory: Path) -> tuple[TransformerXL, Tokenizer | None]:
    """A stored model and its tokenizer."""
    stored = find_model(directory)
    return stored.load(stored.config)


def hf_copy(folder: Path, *, config: dict[str, Any] | None = None, source: Path = OWN_HF) -> Path:
    """A copy to damage, with changed options in its config."""
    folder.mkdir()
    options = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(options | (config or {})))
    shutil.copyfile(source / "pytorch_model.bin", folder / "pytorch_model.bin")
    return folder


def hf_weights() -> dict[str, Tensor]:
    return torch.load(OWN_HF / "pytorch_model.bin", weights_only=True)


def golden_arrays(name: str) -> dict[str, np.ndarray]:
    return read_arrays(OWN_GOLDEN / f"{name}.npz")


def nats_of(model: TransformerXL, segments: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Nats of consecutive segments [B, T], with an empty memory before the first."""
    memory, start, nats = model.empty_memory(len(segments[0][0])), 0, []
    for input_BT, target_BT in segments:
        stop = start + input_BT.shape[1]
        age_BT = torch.arange(start, stop).expand_as(input_BT)
        with torch.no_grad():
            nats_BT, memory = model(input_BT, target_BT, age_BT, memory)
        nats.append(nats_BT)
        start = stop
    return nats
