"""What of the optimizer may change at a resume."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, refusal, score_of_step, tiny_spec, train
from tests.txl_dist.checkpoint.saving import save
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.checkpoint.tensors import load_model
from txl_dist.config.config_file import flatten_config
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.training.compatibility import check_config


def settings(*overrides: str) -> dict[str, Any]:
    return flatten_config(tiny_spec(Path("data"), Path("run"), *overrides).config)


def check(old: dict[str, Any], new: dict[str, Any], *allowed: str) -> None:
    check_config(old, new, allowed=allowed, checkpoint="step-00000001")


@pytest.mark.parametrize("key", ["name", "averaging"])
def test_another_optimizer_or_average_is_refused_even_on_request(key: str) -> None:
    new = settings(f"optimizer.{key}={'adam' if key == 'name' else 'asgd'}")
    with pytest.raises(CheckpointError, match=rf"optimizer\.{key}: .* cannot change in a run"):
        check(settings(), new, f"optimizer.{key}")


def test_the_rate_of_a_part_of_the_model_changes_on_request() -> None:
    old, new = settings(), settings("optimizer.lr_factors={head: 2}")
    key = "optimizer.lr_factors.head"
    with pytest.raises(CheckpointError, match=rf"{key}: .* now 2.0 -> --allow-change"):
        check(old, new)
    check(old, new, key)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("optimizer.name=lamb",), "needs the norms of whole parameters"),
        (("optimizer.name=muon", "deepspeed.zero_stage=3"), "stage 3 cuts every one of them"),
    ],
)
def test_a_stage_that_cannot_run_the_optimizer_is_refused_with_the_reason(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(*overrides)
    settings("optimizer.name=lamb", "deepspeed.zero_stage=0")
    settings("optimizer.name=muon", "deepspeed.zero_stage=2")


def test_evaluation_scores_the_average_and_a_checkpoint_names_its_states(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    short = ("training.num_steps=4", "optimizer.averaging=asgd", "evaluation.max_tokens=40")
    spec = tiny_spec(dataset, tmp_path, *short)
    assert ranks(1).run(train, spec) == [0]
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    assert "scores the average of the weights" in log

    path = tmp_path / "checkpoints" / "step-00000004"
    manifest = load_checkpoint_manifest(path)
    assert manifest.optimizer_states == ("average", "exp_avg", "exp_avg_sq")

    scored = score(path, dataset, "auto")
    assert scored == score(path, dataset, "averaged") != score(path, dataset, "last")
    assert score_of_step(tmp_path, 4).nats_per_token == pytest.approx(scored, rel=1e-6)

    assert ranks(1).run(train, tiny_spec(dataset, tmp_path, NO_EVALUATION, *short[:1])) == [4]
    assert "optimizer.averaging: checkpoint 'asgd', now None" in refusal(tmp_path)


def score(checkpoint: Path, dataset: Path, weights: Any) -> float:
    from txl_dist.evaluation.distributed import evaluate
    from txl_dist.evaluation.spec import evaluation_spec

    spec = evaluation_spec(
        checkpoint, dataset, split="valid", tgt_len=None, mem_len=None, batch=4, max_tokens=40,
        weights=weights,
    )  # fmt: skip
    return evaluate(spec).sums.nats_per_token


def test_averaged_weights_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no averaged weights"):
        load_model(save(tmp_path, step=3), weights="averaged")
