"""Traces of the steps that were asked for, and no files otherwise."""

import json
from pathlib import Path

import pytest

from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, tiny_job, train
from txl_dist.errors import ConfigError


def test_a_trace_has_the_steps_that_were_asked_for(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    job = tiny_job(
        dataset, tmp_path, NO_EVALUATION, "training.num_steps=5", "optimizer.warmup_steps=0",
        "training.profile_steps=[2, 3]",
    )  # fmt: skip
    assert ranks(1).run(train, job) == [0]
    files = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert files == ["rank-0-step-2.json", "rank-0-step-2.txt"]
    events = json.loads((tmp_path / "profile" / files[0]).read_text())["traceEvents"]
    updates = [event for event in events if event.get("name") == "Optimizer.step#AdamW.step"]
    assert len(updates) == 2
    assert "aten::" in (tmp_path / "profile" / files[1]).read_text()


@pytest.mark.parametrize("steps", ["[0, 3]", "[4, 3]"])
def test_steps_that_do_not_exist_are_refused(dataset: Path, tmp_path: Path, steps: str) -> None:
    with pytest.raises(ConfigError, match="first and the last step"):
        tiny_job(dataset, tmp_path, f"training.profile_steps={steps}")


def test_a_range_that_a_change_divides_has_a_file_for_each_part(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    job = tiny_job(
        dataset, tmp_path, NO_EVALUATION, "training.num_steps=6", "optimizer.warmup_steps=0",
        "training.profile_steps=[3, 6]", "training.changes=[{step: 4, num_lanes: 3}]",
    )  # fmt: skip
    assert ranks(1).run(train, job) == [0]
    assert sorted(path.name for path in (tmp_path / "profile").glob("*.json")) == [
        "rank-0-step-3.json",
        "rank-0-step-5.json",
    ]


def test_a_trace_after_the_end_of_the_run_is_refused(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="begins after the end of the run"):
        tiny_job(dataset, tmp_path, "training.num_steps=5", "training.profile_steps=[6, 7]")
