"""A manifest is refused if it is edited, invalid, or under the name of another step."""

import json
import shutil
from pathlib import Path

import pytest

from data_pipeline.system.strict import manifest_bytes
from tests.txl_dist.checkpoint.saving import save
from txl_dist.checkpoint.manifest import CheckpointManifest, load_checkpoint_manifest
from txl_dist.checkpoint.tensors import (
    verify_checkpoint,
)
from txl_dist.errors import CheckpointError


def test_an_edited_manifest_is_refused_though_it_is_well_formed(tmp_path: Path) -> None:
    directory = save(tmp_path, step=3)
    path = directory / "manifest.json"
    content = json.loads(path.read_text())
    content["state"]["position"] += 1
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="digest"):
        load_checkpoint_manifest(directory)


def test_a_model_of_an_earlier_version_has_settings_that_change_nothing(tmp_path: Path) -> None:
    manifest = load_checkpoint_manifest(save(tmp_path, step=3))

    def with_settings(**settings: object) -> CheckpointManifest:
        return manifest.model_copy(update={"model": manifest.model | settings})

    old = with_settings(d_memory_key=32, memory_decay=0.9, zero_init=False, softcap=None)
    assert old.architecture == manifest.architecture
    for changed in ({"d_memory_key": 7}, {"softcap": 15.0}, {"memory": "associative"}):
        with pytest.raises(CheckpointError, match=f"does not support .*{next(iter(changed))}"):
            _ = with_settings(**changed).architecture


@pytest.mark.parametrize("step", [None, -1, "3", 3.5, True])
def test_a_manifest_without_a_valid_step_is_refused(tmp_path: Path, step: object) -> None:
    directory = save(tmp_path, step=3)
    path = directory / "manifest.json"
    content = json.loads(path.read_text())
    del content["digest"]
    content["state"]["step"] = step
    path.write_bytes(manifest_bytes(content))
    with pytest.raises(CheckpointError, match="wrong entry: state"):
        load_checkpoint_manifest(directory)


@pytest.mark.parametrize("name", ["step-00000030", "superseded-step-00000004"])
def test_a_checkpoint_under_another_steps_name_is_refused(tmp_path: Path, name: str) -> None:
    copy = tmp_path / "checkpoints" / name
    shutil.copytree(save(tmp_path, step=3), copy)
    with pytest.raises(CheckpointError, match=rf"{name} holds the checkpoint of step 3"):
        verify_checkpoint(copy)
    copy.rename(tmp_path / "any other name")
    verify_checkpoint(tmp_path / "any other name")
