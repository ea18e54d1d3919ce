"""Recognises the format of a model on disk and reads it, for `txl import`."""

from pathlib import Path
from typing import TYPE_CHECKING

from txl_dist.errors import CheckpointError

if TYPE_CHECKING:
    from data_pipeline.tokenizers import Tokenizer
    from txl_dist.model.transformer_xl import TransformerXL

_LEGAL = (
    "give a TransfoXL directory of transformers (config.json and the weights), the original's "
    "state dict as .npz, or a directory written by txl export"
)


def read_model(source: Path) -> "tuple[TransformerXL, Tokenizer | None, str]":
    """The model, its tokenizer (only `txl export` writes one) and the name of the format.

    Raises CheckpointError for invalid files, ConfigError for an invalid config.
    """
    if not source.exists():
        raise CheckpointError(f"{source} does not exist; {_LEGAL}: txl import SOURCE --out PATH")
    # Imported only now: they import torch.
    from txl_dist.convert.architecture import read_json
    from txl_dist.convert.original import read_original
    from txl_dist.convert.single_file import is_exported, load_exported
    from txl_dist.convert.transformers import read_transformers

    if source.is_file() and source.suffix == ".npz":
        return read_original(source), None, "original"
    if not (source / "config.json").is_file():
        hint = ""
        if any((source / name).exists() for name in ("checkpoints", "manifest.json")):
            hint = f". This looks like a run or a checkpoint: txl export {source} --out PATH"
        raise CheckpointError(f"the format of {source} is unknown; {_LEGAL}{hint}")
    # Both remaining formats have a config.json; only an export has a matching "format" in it.
    if is_exported(read_json(source / "config.json")):
        return *load_exported(source), "exported"
    return read_transformers(source), None, "transformers"
