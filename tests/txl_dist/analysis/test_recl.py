"""RECL equals a brute-force implementation of appendix C, and finds known dependency lengths."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txl_dist.analysis.recl import (
    analyse_group,
    relative_effective_context_length,
    relative_gains,
)
from txl_dist.evaluation.breakdown import plan_resampling


def brute_force_gain(losses: list[list[list[float]]], model: int, step: int, r: float) -> float:
    """g_i(c, c') of `losses[model][context][target]`, written as in the appendix."""
    num_targets = len(losses[0][0])
    baseline = [
        min(losses[other][step][target] for other in range(len(losses)))
        for target in range(num_targets)
    ]
    hardest = sorted(range(num_targets), key=lambda target: -baseline[target])
    hardest = hardest[: max(1, round(r * num_targets))]

    def relative_loss(context: int) -> float:
        total = 0.0
        for target in hardest:
            total += min(baseline[target], losses[model][context][target])
        return total / len(hardest)

    short, long = math.exp(relative_loss(step)), math.exp(relative_loss(step + 1))
    return (short - long) / short


def brute_force_recl(
    losses: list[list[list[float]]], contexts: list[int], model: int, r: float, threshold: float
) -> int:
    step = 0
    while step + 1 < len(contexts):
        if brute_force_gain(losses, model, step, r) < threshold:
            return contexts[step]
        step += 1
    return contexts[step]


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(2, 6), st.integers(1, 7)),
    r=st.sampled_from([0.1, 0.3, 0.5, 1.0]),
    threshold=st.sampled_from([0.01, 0.1, 0.3]),
    seed=st.integers(0, 2**16),
)
def test_gains_and_recl_equal_brute_force(
    shape: tuple[int, int, int], r: float, threshold: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    # Losses fall with the context, with noise; rounded, so that targets tie in the top r.
    fall = np.linspace(1, 0.4, shape[1])[:, None]
    losses = np.round(random.exponential(2.0, shape) * fall, 1)
    contexts = [5 + 3 * number for number in range(shape[1])]
    lengths = relative_effective_context_length(losses, contexts, r=r, threshold=threshold)
    for model, length in enumerate(lengths):
        expected = [
            brute_force_gain(losses.tolist(), model, step, r) for step in range(shape[1] - 1)
        ]
        assert length.gains == pytest.approx(expected, abs=1e-12)
        # On the threshold itself, rounding decides.
        if min(abs(gain - threshold) for gain in expected) > 1e-9:
            recl = brute_force_recl(losses.tolist(), contexts, model, r, threshold)
            assert length.recl == recl
            assert length.is_lower_bound == all(gain >= threshold for gain in expected)


def falling_losses(*, uses: int, contexts: list[int], targets: int = 50) -> np.ndarray:
    """Losses [C, N] that fall with every token of context up to `uses`."""
    hardness = np.linspace(1.0, 3.0, targets)
    return np.stack([hardness * (4 - 0.02 * min(context, uses)) for context in contexts])


@pytest.mark.parametrize("r", [0.1, 0.5, 1.0])
def test_each_model_of_a_group_has_its_own_length(r: float) -> None:
    contexts = list(range(10, 121, 10))
    losses = np.stack([falling_losses(uses=uses, contexts=contexts) for uses in (30, 80, 500)])
    short, long, endless = relative_effective_context_length(losses, contexts, r=r)
    assert (short.recl, long.recl, endless.recl) == (30, 80, 120)
    assert (short.is_lower_bound, long.is_lower_bound, endless.is_lower_bound) == (0, 0, 1)
    assert (short.last_gain_ends, long.last_gain_ends, endless.last_gain_ends) == (30, 80, 120)


def test_only_improvements_over_the_best_model_count() -> None:
    """The second model improves by more than the first, but stays worse: it gains nothing."""
    contexts = [10, 20]
    best, worse = np.full((2, 4), 1.0), np.stack([np.full(4, 3.0), np.full(4, 2.0)])
    best[1] = 0.9
    alone = relative_gains(worse[None], r=1.0)
    together = relative_gains(np.stack([best, worse]), r=1.0)
    assert alone[0, 0] == pytest.approx(1 - math.exp(-1))
    assert together[:, 0].tolist() == pytest.approx([1 - math.exp(-0.1), 0.0])
    assert relative_effective_context_length(np.stack([best, worse]), contexts, r=1.0)[1].recl == 10


def test_a_model_has_at_most_the_length_that_it_can_use() -> None:
    contexts = [100, 200, 300]
    losses = np.stack([falling_losses(uses=128, contexts=contexts, targets=5)])
    (length,) = relative_effective_context_length(losses, contexts, r=1.0, max_contexts=[128])
    assert (length.recl, length.last_gain_ends, length.is_lower_bound) == (128, 128, False)
    losses = np.stack([falling_losses(uses=900, contexts=contexts, targets=5)])
    (length,) = relative_effective_context_length(losses, contexts, r=1.0, max_contexts=[300])
    assert (length.recl, length.is_lower_bound) == (300, False), "more context changes nothing"


def test_a_gap_in_the_gains_ends_recl_and_not_the_last_gain() -> None:
    contexts = list(range(8, 65, 8))
    losses = np.array([[[3.0 if context < 40 else 0.1] * 6 for context in contexts]])
    (length,) = relative_effective_context_length(losses, contexts, r=1.0)
    assert (length.recl, length.last_gain_ends) == (8, 40)


@pytest.mark.parametrize("contexts", [[5], [5, 5], [9, 4], [1, 2, 4], [0, 3]])
def test_contexts_without_one_step_are_refused(contexts: list[int]) -> None:
    with pytest.raises(ValueError, match="fixed step"):
        relative_effective_context_length(np.ones((1, len(contexts), 3)), contexts, r=1.0)


@pytest.mark.parametrize(("loss", "r", "reason"), [(np.nan, 1.0, "finite"), (1.0, 0, "r=0")])
def test_losses_and_fractions_that_mean_nothing_are_refused(
    loss: float, r: float, reason: str
) -> None:
    losses = np.ones((2, 2, 3))
    losses[1, 0, 2] = loss
    with pytest.raises(ValueError, match=reason):
        relative_effective_context_length(losses, [5, 10], r=r)


def test_a_perplexity_that_no_float_holds_is_null() -> None:
    losses, document_N = np.array([[[800.0, 800.0], [2.0, 2.0]]]), np.arange(2)
    (model,) = analyse_group(
        losses,
        [5, 10],
        document_N,
        plan_resampling(document_N, num_resamples=3, seed=0),
        r_values=[1.0],
        threshold=0.01,
        max_contexts=[100],
    )
    assert [point["perplexity"] for point in model["curve"]] == [None, math.exp(2)]
