"""Weights from other programs, and models to give to others.

other_programs.py: reads .npz of the paper's code and directories of transformers
original_model.py: the paper's Transformer-XL in both: its config and the names of its tensors
checks.py:         config -> ModelConfig, tensors -> checked -> TransformerXL, for every format
stored_model.py:   the export format (txl export, txl import), and `find_model`: a checkpoint or an
                   exported model, for evaluation and generation
hub.py:            a directory for others (txl export --format hf), whose code is standalone.py
"""

from pathlib import Path

from txl_dist.errors import CheckpointError

FORMATS = (
    "give a TransfoXL directory of transformers (config.json and the weights), or the original's "
    "state dict as .npz"
)


def require_source(source: Path) -> None:
    """Raises CheckpointError if there is nothing to import. Imports no torch."""
    if not source.exists():
        raise CheckpointError(f"{source} does not exist; {FORMATS}")
