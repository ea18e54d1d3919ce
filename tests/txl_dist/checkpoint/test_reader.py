"""A checkpoint from a stranger whose hashes are right: read as plain tensors, never run."""

import pickle
from pathlib import Path

import pytest
import torch

from data_pipeline.storage.atomic_files import sha256_file
from tests.support.hostile_pickle import Hostile
from tests.txl_dist.checkpoint import saving
from txl_dist.checkpoint.manifest import FileEntry, load_checkpoint_manifest
from txl_dist.checkpoint.reader import load_model
from txl_dist.errors import CheckpointError


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_a_pickle_in_place_of_weights_is_refused_unrun(tmp_path: Path, writer: str) -> None:
    path, mark = saving.save(tmp_path / "run", step=1), tmp_path / "mark"
    weights = path / "weights-rank-00000.safetensors"
    if writer == "torch":
        torch.save({"weight": Hostile(mark)}, weights)
    else:
        weights.write_bytes(pickle.dumps(Hostile(mark)))
    manifest = load_checkpoint_manifest(path)
    entry = FileEntry(bytes=weights.stat().st_size, sha256=sha256_file(weights))
    files = manifest.files | {weights.name: entry}
    (path / "manifest.json").write_bytes(manifest.model_copy(update={"files": files}).to_json())
    with pytest.raises(CheckpointError, match=r"weights-rank-00000\.safetensors"):
        load_model(path)
    assert not mark.exists()
