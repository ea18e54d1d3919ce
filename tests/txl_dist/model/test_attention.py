"""Attention: the fast scores against the equation, and the shift against a loop."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from txl_dist.model.attention import fast_scores, reference_scores
from txl_dist.model.distances import align_distances, align_padded_distances, encode_distances

DIFFERENT_SIZES = st.lists(st.integers(1, 7), min_size=5, max_size=5, unique=True)


def score_inputs(B: int, T: int, M: int, H: int, K: int) -> list[Tensor]:
    """q, k, r, u and v of `ScoreFunction`, asking for gradients."""
    torch.manual_seed(0)
    shapes = [(B, T, H, K), (B, M + T, H, K), (M + T, H, K), (H, K), (H, K)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def visible_keys(T: int, M: int) -> Tensor:
    return torch.ones(T, M + T, dtype=torch.bool).tril(M)


@settings(max_examples=40, deadline=None)
@given(DIFFERENT_SIZES)
@example([2, 3, 0, 4, 5])  # no memory
@example([1, 1, 1, 1, 1])
def test_fast_scores_equal_the_equation_on_every_visible_key(sizes: list[int]) -> None:
    B, T, M, H, K = sizes
    inputs = score_inputs(B, T, M, H, K)
    fast_BHTS, reference_BHTS = fast_scores(*inputs), reference_scores(*inputs)
    assert fast_BHTS.shape == (B, H, T, M + T)
    assert_close(fast_BHTS[..., visible_keys(T, M)], reference_BHTS[..., visible_keys(T, M)])


@settings(max_examples=40, deadline=None)
@given(DIFFERENT_SIZES)
@example([2, 3, 0, 4, 5])
def test_their_gradients_equal_too(sizes: list[int]) -> None:
    B, T, M, H, K = sizes
    inputs = score_inputs(B, T, M, H, K)
    weight_BHTS = torch.randn(B, H, T, M + T, dtype=torch.float64) * visible_keys(T, M)
    fast, reference = (
        torch.autograd.grad((scores(*inputs) * weight_BHTS).sum(), inputs)
        for scores in (fast_scores, reference_scores)
    )
    assert_close(fast, reference)


def test_the_equation_is_the_papers_four_terms() -> None:
    B, T, M, H, K = 2, 3, 4, 5, 6
    q, k, r, u, v = score_inputs(B, T, M, H, K)
    scores = reference_scores(q, k, r, u, v)
    for t in range(T):
        for s in range(M + t + 1):
            r_of_distance = r[(M + T - 1) - (M + t - s)]
            expected = (
                (q[:, t] * k[:, s]).sum(-1)
                + (q[:, t] * r_of_distance).sum(-1)
                + (u * k[:, s]).sum(-1)
                + (v * r_of_distance).sum(-1)
            ) / K**0.5
            assert_close(scores[:, :, t, s], expected)


@settings(max_examples=40, deadline=None)
@given(T=st.integers(1, 6), M=st.integers(0, 7))
def test_the_shift_gives_every_visible_key_the_score_of_its_distance(T: int, M: int) -> None:
    S = M + T
    by_distance = torch.randn(2, 3, T, S)
    aligned = align_distances(by_distance)
    for t in range(T):
        for s in range(M + t + 1):
            column = S - 1 - (M + t - s)  # the column of distance M + t - s
            assert torch.equal(aligned[..., t, s], by_distance[..., t, column])


def test_the_shift_of_padded_scores_copies_nothing() -> None:
    padded = torch.randn(2, 3, 8)
    assert align_padded_distances(padded).untyped_storage().data_ptr() == padded.data_ptr()


def test_distances_are_encoded_as_in_the_paper() -> None:
    found_SD = encode_distances(9, 6, clamp_len=None, dtype=torch.float64, device="cpu")
    for row, distance in enumerate(range(8, -1, -1)):
        angles = torch.tensor([distance / 10000 ** (i / 6) for i in (0, 2, 4)]).double()
        assert_close(found_SD[row], torch.cat([angles.sin(), angles.cos()]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("clamp_len", [1, 4, 8, 20])
def test_clamped_distances_share_the_encoding_of_clamp_len(clamp_len: int) -> None:
    options = {"dtype": torch.float64, "device": "cpu"}
    free_SD = encode_distances(9, 6, clamp_len=None, **options)
    clamped_SD = encode_distances(9, 6, clamp_len=clamp_len, **options)
    for row, distance in enumerate(range(8, -1, -1)):
        assert torch.equal(clamped_SD[row], free_SD[8 - min(distance, clamp_len)])
