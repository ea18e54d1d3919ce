"""Which of the formats a path is in; the one way in for `txl import`."""

from pathlib import Path

from data_pipeline.tokenizers import Tokenizer
from txl_dist.convert.architecture import read_json
from txl_dist.convert.original import read_original
from txl_dist.convert.single_file import is_exported, load_exported
from txl_dist.convert.transformers import read_transformers
from txl_dist.errors import CheckpointError
from txl_dist.model.transformer_xl import TransformerXL

_LEGAL = (
    "give a TransfoXL directory of transformers (config.json beside the weights), the original's "
    "state dict as .npz, or what txl export wrote"
)


def read_model(source: Path) -> tuple[TransformerXL, Tokenizer | None, str]:
    """Model, tokenizer if the source has one we know, and the format's name.

    Raises CheckpointError or ConfigError saying what is wrong with the source.
    """
    if not source.exists():
        raise CheckpointError(f"{source} does not exist; {_LEGAL}: txl import SOURCE --out PATH")
    if source.is_file() and source.suffix == ".npz":
        return read_original(source), None, "original"
    if not (source / "config.json").is_file():
        hint = ""
        if any((source / name).exists() for name in ("checkpoints", "manifest.json")):
            hint = f". This looks like a run or checkpoint of ours: txl export {source} --out PATH"
        raise CheckpointError(f"{source} is in no format known here; {_LEGAL}{hint}")
    if is_exported(read_json(source / "config.json")):
        return *load_exported(source), "exported"
    return read_transformers(source), None, "transformers"
