"""Weights from other programs, and models to give to others.

other_programs.py: .npz of the paper's code, directory of transformers -> their config and tensors
conversion.py:     config -> ModelConfig, tensors -> checked -> TransformerXL
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
