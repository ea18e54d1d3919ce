"""The golden and import tests read every model of a directory, and fail without one."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.replayed_models import golden_files, hf_directories
from tests.support.small_models import small_model
from txl_dist.convert.original_model import read_original, to_original


def test_every_model_of_a_directory_is_read_with_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("README.md", "a model.npz", "zz.npz"):
        (tmp_path / name).touch()
    monkeypatch.setenv("TXL_GOLDEN_DIR", str(tmp_path))
    assert [path.name for path in golden_files()] == ["a model.npz", "zz.npz"]

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    monkeypatch.setenv("TXL_HF_DIR", str(tmp_path))
    assert [path.name for path in hf_directories()] == ["one", "two"]
    monkeypatch.setenv("TXL_HF_DIR", str(tmp_path / "two"))
    assert [path.name for path in hf_directories()] == ["two"]


@pytest.mark.parametrize("folder", ["missing", "."], ids=["missing", "empty"])
@pytest.mark.parametrize(
    ("variable", "find"), [("TXL_GOLDEN_DIR", golden_files), ("TXL_HF_DIR", hf_directories)]
)
def test_a_directory_without_models_is_a_failure(
    variable: str, find, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / folder))
    with pytest.raises(pytest.fail.Exception, match=f"{variable} is {tmp_path / folder}"):
        find()


@pytest.mark.parametrize("tie_projs", [(), (True,), (True, False, True), (True, True, True)])
def test_tied_projections_of_one_table_are_read(tmp_path: Path, tie_projs: tuple) -> None:
    model = small_model(cutoffs=(2, 7), d_embed=3, tie_projs=tie_projs).float()
    config = model.config
    sizes = ("n_layer", "d_model", "n_head", "d_head", "d_inner", "d_embed", "mem_len")
    arguments = {name: getattr(config, name) for name in sizes} | {
        "n_token": config.vocab_size,
        "cutoffs": list(config.cutoffs),
        "div_val": 1,
        "tie_projs": [*tie_projs] or [False],
    }
    weights = to_original(model.state_dict(), config)
    arrays = {name: weight.numpy() for name, weight in weights.items()}
    np.savez(tmp_path / "model.npz", config_json=json.dumps(arguments), **arrays)
    imported = read_original(tmp_path / "model.npz")
    assert imported.config.tie_projs == (tie_projs or (False,))
    assert imported.state_dict().keys() == model.state_dict().keys()
