"""The length of a run in steps, tokens or epochs: the same steps, and a resume compares steps."""

from pathlib import Path

import pytest

from data_pipeline.streams.lanes import LanePlan
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, losses, refusal, tiny_job, train
from txl_dist.config.config_file import load_run_config
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError
from txl_dist.training.duration import resolve_duration

PLAN = LanePlan(num_tokens=64, num_lanes=5, tgt_len=3)  # 12 tokens per lane: 4 steps per epoch
ALL_UNSET = ("training.num_steps=null", NO_EVALUATION)


def config(*overrides: str) -> RunConfig:
    return tiny_job(Path("data"), Path("run"), *overrides).config


@pytest.mark.parametrize(
    ("length", "num_steps"),
    [
        ("num_tokens=60", 4),
        ("num_tokens=61", 5),
        ("num_tokens=1", 1),
        ("num_epochs=1", 4),
        ("num_epochs=2.5", 10),
        ("num_epochs=1.01", 5),
        ("num_epochs=0.001", 1),
        ("num_steps=7", 7),
    ],
)
def test_tokens_and_epochs_are_rounded_up_to_whole_steps(length: str, num_steps: int) -> None:
    written = config(*ALL_UNSET, "optimizer.warmup_steps=0", f"training.{length}")
    assert resolve_duration(written, PLAN).num_steps == num_steps


def test_a_warm_up_longer_than_the_resolved_run_is_refused() -> None:
    written = config(*ALL_UNSET, "training.num_epochs=0.5")
    with pytest.raises(ConfigError, match=r"warmup_steps=4 is longer than training.num_steps=2"):
        resolve_duration(written, PLAN)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("training.num_epochs=2",), "num_steps=20 and num_epochs=2.0 all set the length"),
        (("training.num_steps=null",), "num_steps, num_tokens or num_epochs is missing"),
    ],
)
def test_exactly_one_length_is_required(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*overrides)


def test_a_run_in_tokens_is_the_run_in_steps_and_resumes_as_either(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    short = (NO_EVALUATION, "optimizer.warmup_steps=2")
    in_tokens = (*short, "training.num_steps=null", "training.num_tokens=90")
    run = tmp_path / "tokens"
    assert ranks(1).run(train, tiny_job(dataset, run, *in_tokens)) == [0]
    assert list(losses(run)) == [1, 2, 3, 4, 5, 6]
    # The file keeps what the user wrote, so that it is a valid config.
    written = load_run_config(run / "config.yaml").training
    assert (written.num_steps, written.num_tokens) == (None, 90)

    # The same length in another unit is no change; another length is.
    in_steps = tiny_job(dataset, run, *short, "training.num_steps=6")
    assert ranks(1).run(train, in_steps) == [0]
    longer = (*short, "training.num_steps=null", "training.num_tokens=91")
    assert ranks(1).run(train, tiny_job(dataset, run, *longer)) == [4]
    assert "training.num_steps: checkpoint 6, now 7 -> --allow-change" in refusal(run)


def test_epochs_are_the_decimal_number_that_was_written() -> None:
    """0.07 * 100 is 7.000000000000001 in floating point, which would be a step more."""
    plan = LanePlan(num_tokens=504, num_lanes=5, tgt_len=1)
    assert plan.lane_tokens == 100
    written = config(*ALL_UNSET, "optimizer.warmup_steps=0", "training.num_epochs=0.07")
    assert resolve_duration(written, plan).num_steps == 7


def test_an_average_that_would_never_begin_is_refused() -> None:
    average = ("optimizer.averaging=asgd", "optimizer.averaging_start_step=99")
    with pytest.raises(ConfigError, match="is after the end of the run"):
        config(*average, "training.num_steps=20")
