"""Sampling: the distribution asked for, and only tokens that may be drawn."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from txl_dist.generation.sampling import Sampling, next_token

logits = st.lists(st.one_of(st.floats(-8, 8), st.sampled_from([0.0, 1.0])), min_size=1, max_size=9)


def drawn(logits_V: Tensor, sampling: Sampling, num_draws: int = 60) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return [next_token(logits_V, sampling, generator) for _ in range(num_draws)]


@settings(max_examples=50, deadline=None)
@given(logits=logits)
def test_temperature_0_takes_the_likeliest(logits: list[float]) -> None:
    logits_V = torch.tensor(logits)
    for token in drawn(logits_V, Sampling(temperature=0, top_k=3, top_p=0.5), num_draws=3):
        assert logits_V[token] == logits_V.max()


@settings(max_examples=50, deadline=None)
@given(logits=logits, top_k=st.integers(1, 10))
@example(logits=[0.0, 0.0, 1.0, 1.2013333618494839e-45, 1.0], top_k=3)
def test_top_k_draws_from_the_k_likeliest_ties_included(logits: list[float], top_k: int) -> None:
    logits_V = torch.tensor(logits)
    found = set(drawn(logits_V, Sampling(temperature=3.0, top_k=top_k)))
    assert len(found) <= top_k
    likeliest = logits_V.sort(descending=True).values[:top_k]
    assert all(logits_V[token] >= likeliest[-1] for token in found)


@settings(max_examples=50, deadline=None)
@given(logits=logits, top_p=st.floats(0.01, 1.0))
def test_top_p_draws_from_the_smallest_nucleus(logits: list[float], top_p: float) -> None:
    logits_V = torch.tensor(logits)
    probability_V = logits_V.double().softmax(-1)
    for token in drawn(logits_V, Sampling(top_p=top_p)):
        likelier = probability_V[probability_V > probability_V[token]].sum()
        assert likelier < top_p + 1e-9, "those before it do not hold top_p yet"


def test_the_nucleus_is_cut_where_top_p_is_reached() -> None:
    logits_V = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    nuclei = {0.3: {1}, 0.6: {1, 3}, 0.8: {1, 2, 3}, 0.95: {0, 1, 2, 3}}
    for top_p, nucleus in nuclei.items():
        assert set(drawn(logits_V, Sampling(top_p=top_p), num_draws=400)) == nucleus


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_distribution(temperature: float) -> None:
    logits_V = torch.tensor([0.0, 1.0, 2.0, -torch.inf])
    draws = drawn(logits_V, Sampling(temperature=temperature), num_draws=4000)
    found_V = torch.tensor(draws).bincount(minlength=4) / 4000
    expected_V = (logits_V / temperature).softmax(-1)
    assert (found_V - expected_V).abs().max() < 0.04  # five sigmas
    assert 3 not in draws


def test_top_p_is_taken_after_temperature_and_top_k() -> None:
    logits_V = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    of_two = Sampling(top_k=2, top_p=0.5)  # 4/7 and 3/7: the first alone holds a half
    assert set(drawn(logits_V, of_two)) == {0}
    hot = Sampling(temperature=100.0, top_p=0.5)  # nearly a quarter each
    assert set(drawn(logits_V, hot)) <= {0, 1, 2}
    assert {0, 1} <= set(drawn(logits_V, hot))


@pytest.mark.parametrize(
    "nonsense",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0},
     {"top_p": 1.1}],
    ids=str,
)  # fmt: skip
def test_nonsense_is_refused(nonsense: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(nonsense))):
        Sampling(**nonsense)
