"""The interval of a score by resampling documents."""

import math
from dataclasses import replace

import numpy as np
import pytest

from txl_dist.evaluation.bootstrap import MIN_DOCUMENTS
from txl_dist.evaluation.breakdown import LossTable, paired_difference, score_intervals


def documents(num_documents: int, *, seed: int = 0) -> LossTable:
    """Documents of 1 to 50 tokens, whose mean losses differ."""
    random = np.random.default_rng(seed)
    tokens_D = random.integers(1, 51, num_documents)
    return LossTable(
        key_K=np.cumsum(tokens_D),
        nats_K=tokens_D * random.normal(3.0, 0.5, num_documents),
        tokens_K=tokens_D,
        bytes_K=4 * tokens_D,
    )


def interval_of(sums: LossTable) -> tuple[float, float]:
    """That of the nats per token."""
    intervals = score_intervals(sums)
    assert intervals is not None
    ends = intervals["nats_per_token"]
    assert ends is not None
    return ends


@pytest.mark.parametrize("seed", range(2))
def test_the_interval_contains_the_score_and_shrinks_with_more_documents(seed: int) -> None:
    widths = []
    for num_documents in (10, 160, 2560):
        sums = documents(num_documents, seed=seed)
        low, high = interval_of(sums)
        assert low < sums.nats_K.sum() / sums.tokens_K.sum() < high
        widths.append(high - low)
    residual_D = sums.nats_K - sums.nats_K.sum() / sums.tokens_K.sum() * sums.tokens_K
    standard_error = math.sqrt((residual_D**2).sum()) / sums.tokens_K.sum()
    assert widths[-1] == pytest.approx(2 * 1.96 * standard_error, rel=0.15)
    # 16 times the documents: a quarter of the width.
    assert widths[0] / widths[1] == pytest.approx(4, rel=0.6)
    assert widths[1] / widths[2] == pytest.approx(4, rel=0.3)


@pytest.mark.slow
def test_the_interval_covers_the_true_mean_as_often_as_it_says() -> None:
    intervals = [interval_of(documents(60, seed=seed)) for seed in range(40)]
    covered = [low <= 3.0 <= high for low, high in intervals]
    assert 34 <= sum(covered) <= 40  # 38 expected


def test_the_interval_is_the_same_every_time_and_that_of_a_function_is_its_function() -> None:
    intervals = score_intervals(documents(20))
    assert intervals == score_intervals(documents(20))
    assert intervals is not None
    low, high = interval_of(documents(20))
    assert intervals["perplexity"] == (math.exp(low), math.exp(high))
    assert intervals["bits_per_token"] == (low / math.log(2), high / math.log(2))
    assert intervals["bits_per_byte"] == (
        pytest.approx(low / 4 / math.log(2)),
        pytest.approx(high / 4 / math.log(2)),
    )


def test_documents_of_equal_loss_have_an_interval_without_width_and_few_have_none() -> None:
    equal = LossTable(
        np.arange(12), np.arange(1.0, 13.0), np.arange(1, 13), np.zeros(12, dtype=np.int64)
    )
    intervals = score_intervals(equal)
    assert intervals is not None
    assert intervals["nats_per_token"] == (1.0, 1.0)
    assert intervals["bits_per_byte"] is None
    few = documents(MIN_DOCUMENTS - 1)
    assert score_intervals(few) is None
    assert score_intervals(documents(MIN_DOCUMENTS)) is not None
    assert paired_difference(few, few) == (0.0, None)


def test_a_paired_difference_leaves_out_how_hard_the_documents_are() -> None:
    base = documents(40)
    noise = np.random.default_rng(1).normal(0.02, 0.01, 40)
    better = replace(base, nats_K=base.nats_K - noise * base.tokens_K)
    difference, ends = paired_difference(better, base)
    assert difference == pytest.approx(-(noise * base.tokens_K).sum() / base.tokens_K.sum())
    assert ends is not None
    assert ends[0] < difference < ends[1] < 0, "although the documents differ by 0.5"
    (low, high), (other_low, other_high) = interval_of(better), interval_of(base)
    assert max(low, other_low) < min(high, other_high), "the intervals of the scores overlap"
    back, turned = paired_difference(base, better)
    assert (back, turned) == (-difference, (pytest.approx(-ends[1]), pytest.approx(-ends[0])))
