"""A finished run of a tiny model, for the commands that read one."""

from pathlib import Path

import pytest

from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import tiny_spec, train


@pytest.fixture(scope="package")
def run(ranks: RankGroups, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    assert ranks(1).run(train, tiny_spec(dataset, run, "evaluation.max_tokens=300")) == [0]
    return run
