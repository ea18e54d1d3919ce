"""Ray reads its token once per process, so all tests of this process use the same token."""

import os
from pathlib import Path

import pytest

from cluster.connection import ACCESS_TOKEN
from cluster.launcher import RayLauncher
from tests.support.training_runs import tiny_spec

os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = ACCESS_TOKEN


@pytest.fixture(scope="session")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps, trained by two ranks on Ray."""
    run = tmp_path_factory.mktemp("ray") / "run"
    lines: list[str] = []
    RayLauncher().train(tiny_spec(dataset, run), num_ranks=2, on_line=lines.append)
    assert any("step 20 | loss" in line for line in lines)
    assert any("2 ranks on cpu" in line for line in lines)
    return run
