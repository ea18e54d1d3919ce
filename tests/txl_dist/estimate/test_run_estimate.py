"""Bytes of real ranks against the estimate, and padding."""

from typing import Any

import pytest

from data_pipeline.streams.lanes import LanePlan
from tests.support.gloo_ranks import RankGroups
from tests.support.measured_steps import MeasuredSteps, measure_steps
from tests.txl_dist.estimate.models import run_config
from txl_dist.config.run_config import RunConfig
from txl_dist.estimate.run_estimate import RunEstimate, estimate_run
from txl_dist.runtime.world import World

MAX_ERROR = 0.10
SPREAD = {"stage3_param_persistence_threshold": 0}
FEW_ACTIVATIONS = {"tgt_len": 4, "model": {"mem_len": 4}}
CASES: dict[str, dict[str, Any]] = {
    "activations": {},
    "weights": FEW_ACTIVATIONS,
    "micro-batches": {"training": {"micro_batch_lanes": 1}},
    "frozen": {**FEW_ACTIVATIONS, "optimizer": {"lr_factors": {"hidden": 0}}},
    "frozen table": {**FEW_ACTIVATIONS, "optimizer": {"lr_factors": {"embedding": 0}}},
    "spread": {"zero": SPREAD},
    "small buckets": {"zero": {"reduce_bucket_size": 50_000}},
    "overlapped": {"zero": {"overlap_comm": True, "reduce_bucket_size": 50_000}},
    "large table": {**FEW_ACTIVATIONS, "model": {"mem_len": 4, "vocab_size": 20_000}},
    "large table, overlapped": {
        "tgt_len": 4,
        "model": {"mem_len": 4, "vocab_size": 20_000},
        "zero": {"overlap_comm": True},
    },
    "large table and activations, overlapped": {
        "tgt_len": 16,
        "model": {"mem_len": 16, "vocab_size": 20_000, "cutoffs": [2000, 4000]},
        "zero": {"overlap_comm": True},
    },
    "large table and micro-batches, overlapped": {
        "tgt_len": 16,
        "model": {"mem_len": 16, "n_layer": 6, "vocab_size": 20_000, "cutoffs": [2000, 4000]},
        "training": {"micro_batch_lanes": 1},
        "zero": {"overlap_comm": True},
    },
    "many layers, overlapped": {
        "tgt_len": 4,
        "model": {"mem_len": 4, "n_layer": 20},
        "zero": {"overlap_comm": True, "reduce_bucket_size": 50_000},
    },
}


def measured(world: World, stage: int, case: str) -> MeasuredSteps:
    return measure_steps(run_config(zero_stage=stage, **CASES[case]), world)


def estimate(config: RunConfig, *, gpus: int = 1) -> RunEstimate:
    return estimate_run(config, gpus=gpus, peak_tflops=1, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("stage", "case"),
    [(stage, case) for stage in range(4) for case in CASES if case != "spread" or stage == 3],
)
def test_the_estimate_is_within_10_percent_of_real_steps(
    ranks: RankGroups, stage: int, case: str, num_ranks: int
) -> None:
    real = ranks(num_ranks).run(measured, stage, case)
    config = run_config(zero_stage=stage, **CASES[case])
    run = estimate(config, gpus=num_ranks)
    assert run.num_parameters == real[0].num_parameters
    peak = max(each.peak_bytes for each in real)
    assert run.stages[stage].device == pytest.approx(peak, rel=MAX_ERROR)


@pytest.mark.parametrize("num_lanes", [1, 5, 12])
def test_padding_is_what_the_lanes_of_a_rank_need(num_lanes: int) -> None:
    config = run_config(num_lanes=num_lanes)
    plan = LanePlan(num_tokens=10_000, num_lanes=num_lanes, tgt_len=8)
    for gpus in range(1, num_lanes + 1):
        padded = 1 - num_lanes / (plan.rows_per_rank(gpus) * gpus)
        assert estimate(config, gpus=gpus).padded_share == pytest.approx(padded)


@pytest.mark.parametrize(("kind", "share"), [("recurrent", 0.5), ("tokens", 1.0)])
def test_states_that_stay_fp32_are_counted_so(kind: str, share: float) -> None:
    """With `training.memory_dtype: bf16` a recurrent memory has half the bytes, tokens all."""
    options = {"model": {"memory": kind}}
    lanes = [
        estimate(run_config(**options, training={"memory_dtype": dtype, "backprop_segments": 2}))
        .stages[0]
        .lanes
        for dtype in ("fp32", "bf16")
    ]
    assert lanes[1] == share * lanes[0]
