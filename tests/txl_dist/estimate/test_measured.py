"""Memory and collectives of real ranks, against the estimate."""

from typing import Any

import pytest

from tests.support.gloo_ranks import RankGroups
from tests.txl_dist.estimate.models import run_config
from txl_dist.estimate.assumptions import Assumptions
from txl_dist.estimate.communication import collectives_of_step
from txl_dist.estimate.data_facts import DataFacts
from txl_dist.estimate.dry_run import dry_run
from txl_dist.estimate.measured import MeasuredSteps, measure_steps
from txl_dist.estimate.run_estimate import estimate_run
from txl_dist.estimate.zero_settings import ZeroSettings
from txl_dist.runtime.world import World

pytestmark = pytest.mark.slow
MAX_ERROR = 0.10
SPREAD = {"stage3_param_persistence_threshold": 0}
FEW_ACTIVATIONS = {"tgt_len": 4, "model": {"mem_len": 4}}
CASES: dict[str, dict[str, Any]] = {
    "activations": {},
    "weights": FEW_ACTIVATIONS,
    "micro-batches": {"training": {"micro_batch_lanes": 1}},
    "offload": {**FEW_ACTIVATIONS, "offload": "optimizer"},
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


def is_possible(stage: int, case: str) -> bool:
    return {"offload": stage > 0, "spread": stage == 3}.get(case, True)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("stage", "case"),
    [(stage, case) for stage in range(4) for case in CASES if is_possible(stage, case)],
)
def test_the_estimate_is_within_10_percent_of_real_steps(
    ranks: RankGroups, stage: int, case: str, num_ranks: int
) -> None:
    real = ranks(num_ranks).run(measured, stage, case)
    config = run_config(zero_stage=stage, **CASES[case])
    facts = DataFacts(vocab_size=config.model.vocab_size, num_steps=10)
    run = estimate_run(config, facts, gpus=[num_ranks], assumptions=Assumptions(device="cpu"))
    assert run.num_parameters == real[0].num_parameters
    memory = run.scales[0].stages[stage].memory
    peak = max(each.peak_bytes for each in real)
    assert memory.total == pytest.approx(peak, rel=MAX_ERROR)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("case", ["activations", "micro-batches", "spread"])
def test_collectives_are_those_of_real_steps(ranks: RankGroups, stage: int, case: str) -> None:
    if not is_possible(stage, case):
        pytest.skip("a setting of stage 3")
    real = ranks(2).run(measured, stage, case)[0]
    config = run_config(zero_stage=stage, **CASES[case])
    micro_batches = 2 if case == "micro-batches" else 1
    expected: dict[str, float] = {}
    messages: dict[str, int] = {}
    for each in collectives_of_step(
        dry_run(config, micro_batch_rows=1, device="cpu"),
        ZeroSettings.of(config.deepspeed, num_ranks=2, on_gpu=False),
        num_micro_batches=micro_batches,
    ):
        expected[each.kind] = expected.get(each.kind, 0) + each.num_bytes
        messages[each.kind] = messages.get(each.kind, 0) + each.num_messages
    assert real.collective_bytes == pytest.approx(expected, rel=0.02, abs=200)
    # DeepSpeed splits buckets at the ends of parameters.
    for kind, number in messages.items():
        assert number <= real.num_messages[kind] <= number + 4 * micro_batches
