"""Promise 8: no pickle is loaded and no path leads outside, in shards, manifests and checkpoints.

Imported weights are tested in tests/txl_dist/convert, URLs in tests/data_pipeline/system.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import load_manifest
from data_pipeline.system.files import sha256_file
from data_pipeline.system.strict import manifest_bytes
from tests.data_pipeline.conftest import corpus, dataset, txl  # noqa: F401 - fixtures
from tests.properties.test_nothing_silent import Dataset, sign
from tests.support.hostile_pickle import Hostile
from tests.txl_dist.checkpoint.saving import save
from txl_dist.checkpoint.manifest import FileEntry, load_checkpoint_manifest
from txl_dist.checkpoint.tensors import load_model
from txl_dist.errors import CheckpointError


@pytest.mark.fault_row(23)
@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_a_pickle_instead_of_weights_is_refused_and_not_run(tmp_path: Path, writer: str) -> None:
    path, mark = save(tmp_path / "run", step=1), tmp_path / "mark"
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


@pytest.mark.fault_row(45)
def test_a_manifest_cannot_point_outside_its_directory(tmp_path: Path) -> None:
    directory = save(tmp_path, step=3)
    path = directory / "manifest.json"
    content = json.loads(path.read_text())
    del content["digest"]
    content["files"]["../../escape"] = content["files"]["tokenizer.json"]
    path.write_bytes(manifest_bytes(content))
    with pytest.raises(CheckpointError, match=r"files\.\.\./\.\./escape"):
        load_checkpoint_manifest(directory)


@pytest.mark.fault_row(21, 22)
@pytest.mark.parametrize(
    "name",
    ["../secret.tar.zst", "/etc/passwd", "train-000001.tar.zst", "train-000000.tar", "pipe:cat x"],
)
@pytest.mark.filterwarnings("ignore:Pydantic serializer")
def test_a_manifest_that_names_another_file_is_refused(dataset: Dataset, name: str) -> None:
    def rename(content: dict[str, Any]) -> None:
        content["splits"]["train"]["shards"][0]["name"] = name

    sign(dataset[0], rename)
    with pytest.raises(DataError, match=r"must be 'train-000000"):
        load_manifest(dataset[0])
