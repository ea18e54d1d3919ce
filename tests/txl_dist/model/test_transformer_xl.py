"""Recurrence: a text read in segments with memory equals the text read in one segment."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.support.small_models import random_text, read_stream, small_model

OPTIONS = [
    {},
    {"pre_lnorm": True},
    {"attention": "reference", "clamp_len": 3},
    {"d_embed": 3, "tie_projs": (True,)},
    {"untie_r": True, "cutoffs": (3, 6), "div_val": 2},
    {"distance_encoding": "shaw", "clamp_len": 4},
    {"distance_encoding": "rotary", "attention": "biased"},
    {"distance_encoding": "alibi"},
    {"distance_encoding": "alibi", "attention": "reference", "clamp_len": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=20, deadline=None)
@given(num_tokens=st.integers(2, 14), tgt_len=st.integers(1, 9), spare=st.integers(0, 5))
def test_segments_with_enough_memory_equal_one_segment(
    options: dict, num_tokens: int, tgt_len: int, spare: int
) -> None:
    model, text_BN = small_model(n_layer=3, **options), random_text(2, num_tokens)
    single_BN, all_inputs = read_stream(model, text_BN, tgt_len=num_tokens, mem_len=num_tokens)
    mem_len = (num_tokens - 2) // tgt_len * tgt_len + spare  # where the last segment starts
    in_segments_BN, memory = read_stream(model, text_BN, tgt_len=tgt_len, mem_len=mem_len)
    assert_close(in_segments_BN, single_BN)
    num_filled = min(mem_len, num_tokens - 1)
    for memory_BMD, all_BND in zip(memory.layers, all_inputs.layers, strict=True):
        assert_close(memory_BMD[:, mem_len - num_filled :], all_BND[:, num_tokens - num_filled :])


@pytest.mark.parametrize("mem_len", [0, 2, 4, 7], ids="M={}".format)
def test_one_layer_sees_its_segment_and_the_mem_len_tokens_before(mem_len: int) -> None:
    model, text_BN, tgt_len = small_model(n_layer=1), random_text(2, 18), 4
    nats_BN, _ = read_stream(model, text_BN, tgt_len=tgt_len, mem_len=mem_len)
    for start in range(0, 17, tgt_len):
        stop, oldest = min(start + tgt_len, 17), max(0, start - mem_len)
        window_BN, _ = read_stream(model, text_BN[:, oldest : stop + 1], tgt_len=18, mem_len=0)
        assert_close(nats_BN[:, start:stop], window_BN[:, start - oldest :])


@pytest.mark.parametrize("short_by", [1, 6])
def test_a_shorter_memory_gives_other_numbers(short_by: int) -> None:
    model, text_BN = small_model(), random_text(2, 9)
    single_BN, _ = read_stream(model, text_BN, tgt_len=8, mem_len=0)
    in_segments_BN, _ = read_stream(model, text_BN, tgt_len=3, mem_len=6 - short_by)
    assert_close(in_segments_BN[:, :3], single_BN[:, :3])
    assert (in_segments_BN[:, 6:] - single_BN[:, 6:]).abs().max() > 1e-4


@pytest.mark.parametrize("mem_len", [2, 4, 7], ids="M={}".format)
def test_same_length_does_not_depend_on_segment_boundaries(mem_len: int) -> None:
    model, text_BN = small_model(n_layer=1, same_length=True), random_text(2, 18)
    once_BN, _ = read_stream(model, text_BN, tgt_len=17, mem_len=mem_len)
    for tgt_len in (1, 3, 5):
        nats_BN, _ = read_stream(model, text_BN, tgt_len=tgt_len, mem_len=mem_len)
        assert_close(nats_BN, once_BN)


def test_no_token_depends_on_a_later_token() -> None:
    model, text_BN = small_model(), random_text(2, 13)
    changed_BN = text_BN.clone()
    changed_BN[:, 8:] = (changed_BN[:, 8:] + 1) % model.config.vocab_size
    nats_BN, _ = read_stream(model, text_BN, tgt_len=5)
    changed_nats_BN, _ = read_stream(model, changed_BN, tgt_len=5)
    assert torch.equal(nats_BN[:, :7], changed_nats_BN[:, :7])  # target 7 is token 8
    assert not torch.equal(nats_BN[:, 8:], changed_nats_BN[:, 8:])
