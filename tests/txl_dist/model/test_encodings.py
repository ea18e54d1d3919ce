"""Distances: the sinusoidal encoding, and the relative shift compared with a loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from txl_dist.model.encodings import align_distances, align_padded_distances, encode_distances


@settings(max_examples=40, deadline=None)
@given(T=st.integers(1, 6), M=st.integers(0, 7))
def test_the_shift_gives_each_visible_key_the_score_of_its_distance(T: int, M: int) -> None:
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
    encoded_SD = encode_distances(9, 6, clamp_len=None, dtype=torch.float64, device="cpu")
    for row, distance in enumerate(range(8, -1, -1)):
        angles = torch.tensor([distance / 10000 ** (i / 6) for i in (0, 2, 4)]).double()
        assert_close(encoded_SD[row], torch.cat([angles.sin(), angles.cos()]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("clamp_len", [1, 4, 8, 20])
def test_clamped_distances_share_the_encoding_of_clamp_len(clamp_len: int) -> None:
    options = {"dtype": torch.float64, "device": "cpu"}
    free_SD = encode_distances(9, 6, clamp_len=None, **options)
    clamped_SD = encode_distances(9, 6, clamp_len=clamp_len, **options)
    for row, distance in enumerate(range(8, -1, -1)):
        assert torch.equal(clamped_SD[row], free_SD[8 - min(distance, clamp_len)])
