"""Promise 3: the same losses for any number of ranks, ZeRO stage and micro-batch size."""

import json
from itertools import product
from pathlib import Path

import pytest

from tests.support.gloo_ranks import RankGroups
from tests.support.running_mean import OTHER_KINDS, overrides_of
from tests.support.training_runs import (
    DROPOUT,
    NO_EVALUATION,
    ZERO,
    losses,
    metrics,
    norms,
    tiny_spec,
    train,
)
from txl_dist.checkpoint.directory import resolve_checkpoint
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.config.training_config import DeepSpeedConfig

STEPS = 20
# float32 has 24 bits: a sum in another order changes a loss by about 1e-8, and twenty steps of
# AdamW accumulate that in the weights. Largest differences over all cases here: 3.4e-8 in the loss,
# 2.8e-7 in the gradient norm. With errors introduced for comparison: memory rows of another
# micro-batch change the loss by 1.8e-5 at step 2 and 3e-2 at the end, a missing lane by 3.6e-4 and
# 0.16. A wrong scale of the loss does not change the losses, because clipping and AdamW cancel it,
# but it changes the gradient norm by half.
TOLERANCE = 2e-6
NORM_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def straight(ranks: RankGroups, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, stage 0, one micro-batch: nothing is sharded, summed over ranks or padded."""
    run = tmp_path_factory.mktemp("straight")
    spec = tiny_spec(dataset, run, NO_EVALUATION, "deepspeed.zero_stage=0", *DROPOUT)
    assert ranks(1).run(train, spec) == [0]
    return run


CASES = [case for case in product((1, 2), ZERO, ("null", "2")) if case != (1, "0", "null")]
QUICK = [
    (1, "0", "2"),
    (1, "3-all-spread", "2"),
    *((2, stage, "2") for stage in ZERO),
    (2, "1", "null"),
]
"""The cases most likely to fail. The others run in `make test-all`."""


@pytest.mark.parametrize(
    ("num_ranks", "stage", "micro_batch"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_losses_do_not_depend_on_ranks_stage_or_micro_batch(
    ranks: RankGroups,
    dataset: Path,
    straight: Path,
    tmp_path: Path,
    num_ranks: int,
    stage: str,
    micro_batch: str,
) -> None:
    spec = tiny_spec(
        dataset,
        tmp_path,
        NO_EVALUATION,
        *DROPOUT,
        *ZERO[stage],
        f"training.micro_batch_lanes={micro_batch}",
    )
    assert ranks(num_ranks).run(train, spec) == [0] * num_ranks

    expected, actual = losses(straight), losses(tmp_path)
    assert sorted(actual) == sorted(expected) == list(range(1, STEPS + 1))
    assert actual == pytest.approx(expected, rel=TOLERANCE)
    assert norms(tmp_path) == pytest.approx(norms(straight), rel=NORM_TOLERANCE)


@pytest.mark.parametrize("stage", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_nor_on_when_gradients_are_reduced(
    ranks: RankGroups, dataset: Path, straight: Path, tmp_path: Path, stage: int
) -> None:
    """As on GPUs, most of them during backward, in buckets smaller than some parameters."""
    reduction = DeepSpeedConfig().reduction(stage=stage, num_ranks=2, on_gpu=True)
    reduction |= {"reduce_bucket_size": 3000}
    settings = (
        f"deepspeed.zero_stage={stage}",
        f"deepspeed.extra={json.dumps({'zero_optimization': reduction})}",
        "training.micro_batch_lanes=2",
    )
    spec = tiny_spec(dataset, tmp_path, NO_EVALUATION, *DROPOUT, *settings)
    assert ranks(2).run(train, spec) == [0, 0]
    assert losses(tmp_path) == pytest.approx(losses(straight), rel=TOLERANCE)
    assert norms(tmp_path) == pytest.approx(norms(straight), rel=NORM_TOLERANCE)


@pytest.fixture(
    scope="module",
    params=[*OTHER_KINDS, "recurrent"],
)
def of_another_memory(
    request: pytest.FixtureRequest,
    ranks: RankGroups,
    dataset: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[tuple[str, ...], Path]:
    """Overrides for a kind of memory, recurrent with gradients through it, and such a run."""
    kind, run = request.param, tmp_path_factory.mktemp("straight")
    memory = overrides_of(kind) if kind != "recurrent" else ("training.backprop_segments=3",)
    spec = tiny_spec(dataset, run, NO_EVALUATION, "deepspeed.zero_stage=0", *DROPOUT, *memory)
    assert ranks(1).run(train, spec) == [0]
    return memory, run


@pytest.mark.parametrize(
    "stage",
    [pytest.param(s, marks=[] if s in ("1", "3-all-spread") else pytest.mark.slow) for s in ZERO],
)
def test_nor_with_any_other_memory(
    ranks: RankGroups,
    dataset: Path,
    of_another_memory: tuple[tuple[str, ...], Path],
    tmp_path: Path,
    stage: str,
) -> None:
    memory, straight = of_another_memory
    manifest = load_checkpoint_manifest(resolve_checkpoint(straight))
    assert manifest.segment_len == (1 if "backprop" in str(memory) else 3)
    settings = (NO_EVALUATION, *DROPOUT, *memory, *ZERO[stage], "training.micro_batch_lanes=2")
    assert ranks(2).run(train, tiny_spec(dataset, tmp_path, *settings)) == [0, 0]
    assert losses(tmp_path) == pytest.approx(losses(straight), rel=TOLERANCE)
    assert norms(tmp_path) == pytest.approx(norms(straight), rel=NORM_TOLERANCE)


CLUSTERS = (NO_EVALUATION, "model.cutoffs=[60, 128]", "model.div_val=2")


@pytest.fixture(scope="module")
def clustered(ranks: RankGroups, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("clustered")
    assert ranks(1).run(train, tiny_spec(dataset, run, *CLUSTERS, *ZERO["0"])) == [0]
    return run


@pytest.mark.parametrize(
    "stage",
    [pytest.param(stage, marks=[] if stage == "3" else pytest.mark.slow) for stage in ZERO],
)
def test_losses_do_not_depend_on_ranks_if_softmax_clusters_are_empty_on_some(
    ranks: RankGroups, dataset: Path, clustered: Path, tmp_path: Path, stage: str
) -> None:
    """Ids from 128 on are rare in this text: most steps have no target in the last cluster."""
    spec = tiny_spec(dataset, tmp_path, *CLUSTERS, *ZERO[stage])
    assert ranks(2).run(train, spec) == [0, 0]
    assert losses(tmp_path) == pytest.approx(losses(clustered), rel=TOLERANCE)
    assert norms(tmp_path) == pytest.approx(norms(clustered), rel=NORM_TOLERANCE)


def test_scores_during_training_do_not_depend_on_ranks(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    """Nine chunks for two ranks: one rank runs the model more often than the other."""
    settings = ("evaluation.max_tokens=300", "evaluation.batch_chunks=1", "model.tie_weight=false")
    one, two = tmp_path / "one", tmp_path / "two"
    assert ranks(1).run(train, tiny_spec(dataset, one, *settings, *ZERO["0"])) == [0]
    assert ranks(2).run(train, tiny_spec(dataset, two, *settings, *ZERO["3-all-spread"])) == [0, 0]
    assert len(scores(one)) == 2
    assert scores(two) == pytest.approx(scores(one), rel=TOLERANCE)
    assert losses(two) == pytest.approx(losses(one), rel=TOLERANCE)


def scores(run: Path) -> list[float]:
    """Losses of the validation split, each time it was scored."""
    return [line["valid/loss"] for line in metrics(run) if "valid/loss" in line]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("model.pre_lnorm=true",), marks=pytest.mark.slow),
        ("model.untie_r=true", "model.d_embed=12"),
        (
            "model.recipe=modern",
            "model.mem_shares=[0.5, 1]",
            "optimizer.name=adamw",
            "optimizer.lr=2e-3",  # with 1e-2, rounding grows to 1e-5 in 20 steps
        ),
    ],
)
def test_losses_do_not_depend_on_ranks_with_other_layers_when_all_weights_are_sharded(
    ranks: RankGroups, dataset: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    settings = (NO_EVALUATION, *options)
    assert ranks(1).run(train, tiny_spec(dataset, one, *settings, *ZERO["0"])) == [0]
    assert ranks(2).run(train, tiny_spec(dataset, two, *settings, *ZERO["3-all-spread"])) == [0, 0]
    assert losses(two) == pytest.approx(losses(one), rel=TOLERANCE)
    assert norms(two) == pytest.approx(norms(one), rel=NORM_TOLERANCE)


def test_tokens_count_every_lane_once_per_step(straight: Path) -> None:
    assert [line["tokens"] for line in metrics(straight)] == [15 * step for step in range(1, 21)]
