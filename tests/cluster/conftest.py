"""Ray reads its token once per process, so all tests of this process use the same token."""

import os
from pathlib import Path

import pytest

from cluster.private_ray import TOKEN_VARIABLE, access_token
from cluster.ray_train import train_on_ray
from tests.support.training_runs import tiny_job
from txl_dist.launch.launcher import RankRange

os.environ["RAY_AUTH_MODE"] = "token"
os.environ[TOKEN_VARIABLE] = str(access_token())


@pytest.fixture(scope="session")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps, trained by two ranks under Ray Train."""
    run = tmp_path_factory.mktemp("ray") / "run"
    lines: list[str] = []
    train_on_ray(tiny_job(dataset, run), ranks=RankRange(2, 2), address=None, on_line=lines.append)
    assert any("step 20 | loss" in line for line in lines)
    assert any("2 ranks on cpu" in line for line in lines)
    return run
