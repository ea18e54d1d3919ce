"""Visibility: the rule of visibility.py, checked for every query and key."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from txl_dist.model.visibility import Visibility, visible_keys


@settings(max_examples=60, deadline=None)
@given(
    ages=st.integers(1, 6).flatmap(
        lambda tgt_len: st.lists(
            st.lists(st.integers(0, 15), min_size=tgt_len, max_size=tgt_len),
            min_size=1,
            max_size=3,
        )
    ),
    mem_len=st.integers(0, 7),
    same_length=st.booleans(),
)
def test_a_key_is_visible_iff_its_distance_is_at_most_the_age(
    ages: list[list[int]], mem_len: int, same_length: bool
) -> None:
    visible_BTS = visible_keys(torch.tensor(ages), mem_len=mem_len, same_length=same_length)
    for b, row in enumerate(ages):
        for t, age in enumerate(row):
            for s in range(mem_len + len(row)):
                i, j = t, s - mem_len
                expected = 0 <= i - j <= age and (i - j < mem_len or not same_length)
                assert visible_BTS[b, t, s] == expected, (b, t, s)


@pytest.mark.parametrize("mem_len", [1, 3, 8])
def test_same_length_shows_exactly_mem_len_keys(mem_len: int) -> None:
    age_BT = torch.full((2, 5), 1000)
    visible_BTS = visible_keys(age_BT, mem_len=mem_len, same_length=True)
    assert (visible_BTS.sum(dim=-1) == mem_len).all()


@pytest.mark.parametrize("mem_len", [0, 1, 3, 8])
def test_a_query_of_high_age_sees_all_memory_and_the_segment_up_to_itself(mem_len: int) -> None:
    visible_BTS = visible_keys(torch.full((2, 5), 1000), mem_len=mem_len, same_length=False)
    assert visible_BTS.sum(dim=-1).tolist() == [[mem_len + t + 1 for t in range(5)]] * 2


def test_every_query_sees_itself() -> None:
    visible_BTS = visible_keys(torch.zeros(2, 5, dtype=torch.int32), mem_len=3, same_length=True)
    assert torch.equal(visible_BTS[0], torch.eye(5, 8, dtype=torch.bool).roll(3, dims=1))


@pytest.mark.parametrize("same_length", [False, True])
def test_reach_and_mask_are_the_same_rule(same_length: bool) -> None:
    mem_len, age_BT = 4, torch.tensor([[0, 1, 2], [9, 3, 0]], dtype=torch.int32)
    options = {"mem_len": mem_len, "same_length": same_length}
    visibility = Visibility.of(age_BT, mask_dtype=torch.float64, **options)
    distance_TS = mem_len + torch.arange(3)[:, None] - torch.arange(mem_len + 3)
    in_reach_BTS = (distance_TS >= 0) & (distance_TS <= visibility.reach_BT[..., None])
    assert torch.equal(in_reach_BTS, visible_keys(age_BT, **options))
    assert torch.equal(in_reach_BTS, visibility.mask == 0)
    assert Visibility.of(age_BT, mask_dtype=None, **options).mask_BTS is None
