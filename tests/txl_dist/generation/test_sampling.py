"""Sampling: tokens have the configured distribution, and excluded tokens never occur."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from txl_dist.errors import TxlError
from txl_dist.generation.options import Sampling
from txl_dist.generation.sampling import next_tokens

logits = st.lists(st.one_of(st.floats(-8, 8), st.sampled_from([0.0, 1.0])), min_size=1, max_size=9)


def sample(logits_V: Tensor, sampling: Sampling, num_samples: int = 60) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    draws = (next_tokens(logits_V[None], sampling, [generator]) for _ in range(num_samples))
    return [token for (token,) in draws]


@settings(max_examples=50, deadline=None)
@given(logits=logits)
def test_temperature_0_takes_the_most_likely_token(logits: list[float]) -> None:
    logits_V = torch.tensor(logits)
    for token in sample(logits_V, Sampling(temperature=0, top_k=3, top_p=0.5), num_samples=3):
        assert logits_V[token] == logits_V.max()


@settings(max_examples=50, deadline=None)
@given(logits=logits, top_k=st.integers(1, 10))
@example(logits=[0.0, 0.0, 1.0, 1.2013333618494839e-45, 1.0], top_k=3)
def test_top_k_samples_from_k_tokens_also_with_ties(logits: list[float], top_k: int) -> None:
    logits_V = torch.tensor(logits)
    sampled = set(sample(logits_V, Sampling(temperature=3.0, top_k=top_k)))
    assert len(sampled) <= top_k
    likeliest = logits_V.sort(descending=True).values[:top_k]
    assert all(logits_V[token] >= likeliest[-1] for token in sampled)


@settings(max_examples=50, deadline=None)
@given(logits=logits, top_p=st.floats(0.01, 1.0))
def test_top_p_samples_from_the_smallest_nucleus(logits: list[float], top_p: float) -> None:
    logits_V = torch.tensor(logits)
    probability_V = logits_V.double().softmax(-1)
    for token in sample(logits_V, Sampling(top_p=top_p)):
        likelier = probability_V[probability_V > probability_V[token]].sum()
        assert likelier < top_p + 1e-9, "more likely tokens sum to less than top_p"


def test_the_nucleus_ends_where_top_p_is_reached() -> None:
    logits_V = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    nuclei = {0.3: {1}, 0.6: {1, 3}, 0.8: {1, 2, 3}, 0.95: {0, 1, 2, 3}}
    for top_p, nucleus in nuclei.items():
        assert set(sample(logits_V, Sampling(top_p=top_p), num_samples=400)) == nucleus


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_distribution(temperature: float) -> None:
    logits_V = torch.tensor([0.0, 1.0, 2.0, -torch.inf])
    tokens = sample(logits_V, Sampling(temperature=temperature), num_samples=4000)
    frequency_V = torch.tensor(tokens).bincount(minlength=4) / 4000
    expected_V = (logits_V / temperature).softmax(-1)
    assert (frequency_V - expected_V).abs().max() < 0.04  # five sigmas
    assert 3 not in tokens


def test_top_p_is_taken_after_temperature_and_top_k() -> None:
    logits_V = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    of_two = Sampling(top_k=2, top_p=0.5)  # 4/7 and 3/7: the first alone reaches 0.5
    assert set(sample(logits_V, of_two)) == {0}
    hot = Sampling(temperature=100.0, top_p=0.5)  # nearly a quarter each
    assert set(sample(logits_V, hot)) <= {0, 1, 2}
    assert {0, 1} <= set(sample(logits_V, hot))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_k=5, top_p=0.9)])
def test_every_lane_draws_as_torch_multinomial_does_with_its_generator(sampling: Sampling) -> None:
    """So the texts of a seed are those of earlier versions."""
    logits_BV = torch.randn(3, 41, generator=torch.Generator().manual_seed(1))
    generators = [torch.Generator().manual_seed(seed) for seed in (7, 7, 8)]
    draws = [next_tokens(logits_BV, sampling, generators) for _ in range(5)]
    for lane, seed in enumerate((7, 7, 8)):
        generator = torch.Generator().manual_seed(seed)
        probability_V = _tempered(logits_BV[lane], sampling)
        expected = [int(torch.multinomial(probability_V, 1, generator=generator)) for _ in draws]
        assert [drawn[lane] for drawn in draws] == expected


def _tempered(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities after top-k, temperature and top-p, one lane at a time."""
    scaled_V = (logits_V.double() - logits_V.max()) / sampling.temperature
    if sampling.top_k:
        scaled_V[logits_V < logits_V.sort().values[-sampling.top_k]] = -torch.inf
    probability_V = scaled_V.softmax(-1)
    if sampling.top_p:
        ordered_V, token_V = probability_V.sort(descending=True)
        is_dropped_V = ordered_V.cumsum(-1) - ordered_V >= sampling.top_p
        probability_V[token_V[is_dropped_V]] = 0
    return probability_V


@pytest.mark.parametrize("logit", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_refused(logit: float) -> None:
    with pytest.raises(TxlError, match="not finite"):
        sample(torch.tensor([0.0, logit]), Sampling())


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0},
     {"top_p": 1.1}],
    ids=str,
)  # fmt: skip
def test_invalid_options_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Sampling(**options)
