"""`training.changes`: a schedule of lanes and lengths is the run that was changed by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.diverging_runs import StopAfter, train_with
from tests.support.gloo_ranks import RankGroups
from tests.support.running_mean import overrides_of
from tests.support.training_runs import DROPOUT, NO_EVALUATION, losses, refusal, tiny_job, train
from txl_dist.checkpoint.directory import resolve_checkpoint
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.checkpoint.reader import verify_checkpoint
from txl_dist.errors import ConfigError
from txl_dist.runtime.world import World
from txl_dist.training import rank
from txl_dist.training.data import TrainingData
from txl_dist.training.job import TrainJob
from txl_dist.training.loop import Trainer
from txl_dist.training.setup import build_trainer

CONSTANT_LR = ("optimizer.schedule=constant", "optimizer.warmup_steps=1")  # for any number of steps
LANES = ("data.num_lanes=8", "model.mem_len=10")
ALLOWED = ("data.num_lanes", "data.tgt_len", "model.mem_len", "training.num_steps")


def hashes(run: Path) -> dict[str, str]:
    """Hashes of the weights, optimizer state and memory of the newest checkpoint."""
    manifest = verify_checkpoint(resolve_checkpoint(run))
    return {name: entry.sha256 for name, entry in manifest.files.items()}


def compare_with_changes_by_hand(
    ranks: RankGroups,
    dataset: Path,
    tmp_path: Path,
    changes: str,
    legs: list[tuple[str, ...]],
    more: tuple[str, ...] = (),
) -> str:
    """Run the schedule, and each leg with `--allow-change`; returns the log of the first."""
    scheduled, by_hand = tmp_path / "scheduled", tmp_path / "by-hand"
    settings = (*CONSTANT_LR, *DROPOUT, NO_EVALUATION, *more)
    overrides = (*legs[-1][:1], f"training.changes={changes}")
    assert ranks(1).run(train, tiny_job(dataset, scheduled, *settings, *overrides)) == [0]
    for leg in legs:
        job = tiny_job(dataset, by_hand, *settings, *leg, allow_change=ALLOWED)
        assert ranks(1).run(train, job) == [0]
    assert losses(scheduled) == losses(by_hand)
    assert hashes(scheduled) == hashes(by_hand)

    manifest = load_checkpoint_manifest(resolve_checkpoint(scheduled))
    assert len(manifest.rank_of_lane) == job.config.data.num_lanes
    written = yaml.safe_load((scheduled / "config.yaml").read_text())
    assert written["data"] == {**written["data"], "num_lanes": 5, "tgt_len": 3}, "as it was given"
    return (scheduled / "logs" / "rank-0.log").read_text()


@pytest.mark.parametrize(
    ("changes", "legs"),
    [
        (
            "[{step: 2, num_lanes: 8}]",
            [("training.num_steps=2",), ("training.num_steps=4", "data.num_lanes=8")],
        ),
        pytest.param(
            "[{step: 5, num_lanes: 8, mem_len: 10}, {step: 7, tgt_len: 4}]",
            [
                ("training.num_steps=5",),
                ("training.num_steps=7", *LANES),
                ("training.num_steps=9", *LANES, "data.tgt_len=4"),
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_schedule_equals_the_same_changes_by_hand(
    ranks: RankGroups, dataset: Path, tmp_path: Path, changes: str, legs: list[tuple[str, ...]]
) -> None:
    log = compare_with_changes_by_hand(ranks, dataset, tmp_path, changes, legs)
    assert log.count("tokens lost by this resume 0, read twice 0") == len(legs) - 1


COMPRESSIVE = ("model.memory=compressive", "model.compression_rate=3")
"""Segments of 3 and 6 tokens are whole blocks."""


@pytest.mark.parametrize(
    ("kind", "settings", "change"),
    [
        ("compressive", COMPRESSIVE, {"num_lanes": 8, "tgt_len": 6, "mem_len": 10}),
        # No number of tokens would rebuild what is written, so the lanes stay.
        ("tokens", overrides_of("tokens"), {"tgt_len": 6}),
    ],
)
def test_so_does_one_with_another_kind_of_memory(
    ranks: RankGroups,
    dataset: Path,
    tmp_path: Path,
    kind: str,
    settings: tuple[str, ...],
    change: dict[str, int],
) -> None:
    sections = {"num_lanes": "data", "tgt_len": "data", "mem_len": "model"}
    changed = [f"{sections[name]}.{name}={value}" for name, value in change.items()]
    entry = ", ".join(f"{name}: {value}" for name, value in change.items())
    legs = [("training.num_steps=2",), ("training.num_steps=5", *changed)]
    changes = f"[{{step: 2, {entry}}}]"
    log = compare_with_changes_by_hand(ranks, dataset, tmp_path, changes, legs, settings)
    assert ("tokens per lane, unscored" in log) == (kind == "compressive"), "read again"


@pytest.mark.slow
@pytest.mark.parametrize("stopped_after", [5, 6, 7])
def test_a_run_stopped_around_a_change_resumes_on_the_same_trajectory(
    ranks: RankGroups, dataset: Path, tmp_path: Path, stopped_after: int
) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    keep = ("training.keep_checkpoints=9", "training.checkpoint_interval_steps=1")
    # The evaluation of step 5 precedes the change after step 5.
    steps = ("training.num_steps=9", "evaluation.interval_steps=5")
    changes = "training.changes=[{step: 5, num_lanes: 8, mem_len: 10}, {step: 7, tgt_len: 4}]"
    settings = (*CONSTANT_LR, *steps, *keep, changes)
    assert ranks(1).run(train, tiny_job(dataset, straight, *settings)) == [0]
    checkpoint = straight / "checkpoints" / f"step-{stopped_after:08}"
    job = tiny_job(dataset, resumed, *settings, resume=str(checkpoint))
    assert ranks(1).run(train, job) == [0]
    expected = {step: loss for step, loss in losses(straight).items() if step > stopped_after}
    assert losses(resumed) == expected
    assert hashes(resumed) == hashes(straight)


def train_bounded(world: World, job: TrainJob) -> tuple[int, int]:
    """Exit code, and how often the parts of the run were built."""
    with pytest.MonkeyPatch.context() as patch:
        num_builds = 0

        def build(*arguments: Any, **options: Any) -> Trainer:
            nonlocal num_builds
            num_builds += 1
            assert num_builds < 4, "a change that never ends"
            return build_trainer(*arguments, **options)

        patch.setattr(rank, "build_trainer", build)
        return train(world, job), num_builds


@pytest.mark.slow
@pytest.mark.parametrize(("evaluation", "num_builds"), [((), 2), ((NO_EVALUATION,), 1)])
def test_a_run_stopped_before_the_evaluation_of_a_change_goes_on(
    ranks: RankGroups, dataset: Path, tmp_path: Path, evaluation: tuple[str, ...], num_builds: int
) -> None:
    """Also if it resumes without evaluation. A start after a stop is no restart."""
    changes = "training.changes=[{step: 2, num_lanes: 8}]"
    settings = (*CONSTANT_LR, "training.num_steps=4", "evaluation.interval_steps=2", changes)
    job = tiny_job(dataset, tmp_path, *settings)
    assert ranks(1).run(train_with, job, StopAfter(2))[0][0] == 75
    job = tiny_job(dataset, tmp_path, *settings, *evaluation)
    assert ranks(1).run(train_bounded, job) == [(0, num_builds)]
    assert json.loads((tmp_path / "goodput.json").read_text())["restarts"] == 0


def test_a_change_of_the_past_is_refused(ranks: RankGroups, dataset: Path, tmp_path: Path) -> None:
    job = tiny_job(dataset, tmp_path, NO_EVALUATION, "training.num_steps=4")
    assert ranks(1).run(train, job) == [0]
    changes = "training.changes=[{step: 2, num_lanes: 8}]"
    overrides = (NO_EVALUATION, "training.num_steps=6", changes)
    allowed = ("training.num_steps", "training.changes")
    job = tiny_job(dataset, tmp_path, *overrides, allow_change=allowed)
    assert ranks(1).run(train, job) == [4]
    assert "data.num_lanes: checkpoint 5, now 8 -> --allow-change data.num_lanes" in refusal(
        tmp_path
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("[{step: 4, num_lanes: 2}, {step: 4, tgt_len: 2}]", "step 4 follows step 4"),
        ("[{step: 4, num_lanes: 0}]", "num_lanes"),
        ("[{step: 4, dropout: 0.1}]", "dropout"),
    ],
)
def test_an_invalid_schedule_is_a_config_error(tmp_path: Path, changes: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_job(tmp_path, tmp_path, f"training.changes={changes}")


def test_a_change_that_the_model_does_not_support_is_a_config_error(tmp_path: Path) -> None:
    overrides = ("model.same_length=true", "training.changes=[{step: 4, mem_len: 0}]")
    with pytest.raises(ConfigError, match="step 4: same_length=true needs"):
        tiny_job(tmp_path, tmp_path, *overrides)


def test_more_ranks_than_a_later_number_of_lanes_are_refused_at_the_start(
    dataset: Path, tmp_path: Path
) -> None:
    job = tiny_job(dataset, tmp_path, "training.changes=[{step: 4, num_lanes: 2}]")
    with pytest.raises(ConfigError, match="3 ranks for data"):
        TrainingData.open(job.config, num_ranks=3)
