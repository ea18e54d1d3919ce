"""Memory of a rank: the example of the ZeRO paper, and monotony."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.txl_dist.estimate.models import model_of
from txl_dist.estimate.rank_bytes import RankBytes, RankPeak, ZeroSettings

GB = 10**9
# 7.5 billion parameters on 64 ranks: figure 1 of the ZeRO paper.
PAPER_SIZES = [10**6] * 7500


def memory(
    stage: int, num_ranks: int = 64, *, activations: int = 0, micro_batches: int = 1, **zero: int
) -> RankBytes:
    return RankPeak(
        model=model_of(*PAPER_SIZES, activations=activations),
        zero=ZeroSettings(stage=stage, reduce_bucket_size=1, prefetch_bucket_size=0, **zero),
        num_ranks=num_ranks,
        num_micro_batches=micro_batches,
        lane_bytes=0,
    ).peak()


def test_without_sharding_the_example_of_the_paper_needs_120_gb() -> None:
    # There 2 + 2 + 12 bytes per parameter in mixed precision, here 4 + 4 + 8 in fp32.
    use = memory(0)
    assert use.weights + use.gradients + use.optimizer == 120 * GB


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_and_states_of_the_example_of_the_paper_are_sharded(stage: int) -> None:
    use = memory(stage)
    whole_weights = 30 * GB if stage < 3 else 30 * GB // 64
    # 12 bytes per parameter over 64 ranks: the paper's 31.4 GB less 30 GB of what stays whole.
    assert use.optimizer + use.weights - whole_weights == pytest.approx(1.4 * GB, rel=0.01)


def test_stage_2_shards_gradients_and_stage_3_weights() -> None:
    part = 30 * GB // 64
    assert memory(1).gradients >= 30 * GB
    # Those of earlier micro-batches and of this one, the latter in whole parameters.
    assert memory(2, micro_batches=2).gradients == pytest.approx(2 * part, rel=0.02)
    assert memory(3).weights == 2 * part


@given(
    stage=st.sampled_from([0, 1, 2, 3]),
    num_ranks=st.integers(1, 2048),
    activations=st.integers(0, 10**11),
    micro_batches=st.integers(1, 4),
)
def test_more_ranks_never_need_more_and_more_activations_never_less(
    stage: int, num_ranks: int, activations: int, micro_batches: int
) -> None:
    def device(ranks: int, extra: int = 0) -> int:
        return memory(
            stage, ranks, activations=activations + extra, micro_batches=micro_batches
        ).device

    # One rank is a case of its own: it gathers and copies nothing.
    assert device(2 * num_ranks + 2) <= device(num_ranks + 1)
    assert device(num_ranks) <= device(num_ranks, extra=GB)


@given(
    stage=st.sampled_from([0, 1, 2, 3]),
    num_ranks=st.integers(1, 8),
    micro_batches=st.integers(1, 2),
    size=st.integers(1, 1000),
    overlap_comm=st.booleans(),
)
def test_a_frozen_weight_needs_its_own_bytes_and_no_others(
    stage: int, num_ranks: int, micro_batches: int, size: int, overlap_comm: bool
) -> None:
    def peak(*frozen: int) -> RankBytes:
        return RankPeak(
            model=model_of(30, 50, frozen=frozen, activations=100),
            # The frozen weight alone would overflow the bucket. Nothing is gathered.
            zero=ZeroSettings(
                stage=stage,
                reduce_bucket_size=100,
                overlap_comm=overlap_comm,
                max_live_parameters=0,
                prefetch_bucket_size=0,
                param_persistence_threshold=0,
            ),
            num_ranks=num_ranks,
            num_micro_batches=micro_batches,
            lane_bytes=0,
        ).peak()

    num_holders = num_ranks if stage == 3 else 1
    own = 4 * (80 + size * num_ranks) // num_holders - 4 * 80 // num_holders
    without = peak()
    assert peak(size * num_ranks) == replace(without, weights=without.weights + own)


@pytest.mark.parametrize(("num_turns", "num_bytes"), [(1, 2000), (4, 1250)])
def test_the_memory_of_the_lanes_of_a_step_exists_twice(num_turns: int, num_bytes: int) -> None:
    use = RankPeak(
        model=model_of(10),
        zero=ZeroSettings(stage=0),
        num_ranks=1,
        num_micro_batches=1,
        lane_bytes=1000,
        num_turns=num_turns,
    ).peak()
    assert use.lanes == num_bytes
