"""Sampled targets have their whole context, in their document, and differ from each other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.token_sources import random_corpus
from txl_dist.context.bootstrap import interval, plan_resampling, resamples
from txl_dist.context.positions import sample_positions
from txl_dist.errors import DataError

LENGTHS = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=4)


@given(lengths=LENGTHS, context=st.integers(1, 8), num_positions=st.integers(1, 9))
def test_targets_have_their_context_in_their_document(
    lengths: list[list[int]], context: int, num_positions: int
) -> None:
    source = random_corpus(lengths, vocab_size=11, seed=1)
    flat = [length for block in lengths for length in block]
    starts = np.cumsum([0, *flat[:-1]])
    eligible = {
        (int(start) + offset, number)
        for number, (start, length) in enumerate(zip(starts, flat, strict=True))
        for offset in range(context, length)
    }
    if not eligible:
        with pytest.raises(DataError, match="--max-context"):
            sample_positions(
                source, context=context, num_positions=num_positions, seed=3, reset="document"
            )
        return
    positions = sample_positions(
        source, context=context, num_positions=num_positions, seed=3, reset="document"
    )
    sampled = list(zip(positions.target_N.tolist(), positions.document_N.tolist(), strict=True))
    assert set(sampled) <= eligible
    assert sorted(set(sampled)) == sampled
    assert len(sampled) == min(num_positions, len(eligible))


def test_reset_stream_looks_past_documents_and_the_seed_changes_the_sample() -> None:
    source = random_corpus([[5, 5], [5, 5]], vocab_size=11, seed=1)
    every = sample_positions(source, context=9, num_positions=100, seed=0, reset="stream")
    assert every.target_N.tolist() == list(range(9, 20))
    assert every.document_N.tolist() == [1, *[2] * 5, *[3] * 5]
    first, again, other = (
        sample_positions(source, context=1, num_positions=5, seed=seed, reset="stream")
        for seed in (0, 0, 1)
    )
    assert first.target_N.tolist() == again.target_N.tolist() != other.target_N.tolist()


def test_resamples_draw_whole_documents() -> None:
    document_N = np.repeat(np.arange(12), [1, 2, 3] * 4)
    resampling = plan_resampling(document_N, num_resamples=50, seed=0)
    assert (resampling.unit, resampling.num_units) == ("document", 12)
    sizes = np.bincount(document_N)
    for indices in resamples(document_N, resampling):
        counts = np.bincount(document_N[indices], minlength=12)
        assert (counts % sizes == 0).all()
        assert (counts // sizes).sum() == 12
    by_position = plan_resampling(document_N[:9], num_resamples=50, seed=0)
    assert (by_position.unit, by_position.num_units) == ("position", 9)


def test_the_interval_of_a_mean_is_about_two_standard_errors_wide() -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=400)
    resampling = plan_resampling(np.arange(400), num_resamples=300, seed=1)
    means = [values[indices].mean() for indices in resamples(np.arange(400), resampling)]
    low, high = interval(means)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.2)
