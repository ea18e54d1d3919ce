"""Weights from other programs, and models to give to others.

original_model.py: reads .npz of the paper's code and directories of transformers, and converts the
                   paper's models: configs and names of tensors
llama_family.py:   Llama, Mistral, Qwen2 and Qwen3 of transformers: config and tensors, both ways
checks.py:         config -> ModelConfig, tensors -> checked -> TransformerXL, for every format
stored_model.py:   the export format (txl export, txl import), and `find_model`: a checkpoint or an
                   exported model, for evaluation and generation
hub.py:            directories for others (txl export --format transformers, or hf, whose code is
                   standalone.py)
"""

from pathlib import Path

from txl_dist.errors import CheckpointError

FORMATS = (
    "give a directory of transformers (config.json and the weights) of a Llama, Mistral, Qwen2, "
    "Qwen3 or TransfoXL, or the original's state dict as .npz"
)

MAX_POSITIONS = 2**17
"""Of an exported model with a window, which has no limit; servers reserve memory for so many tokens
at most."""


def require_source(source: Path) -> None:
    """Raises CheckpointError if there is nothing to import. Imports no torch."""
    if not source.exists():
        raise CheckpointError(f"{source} does not exist; {FORMATS}")
