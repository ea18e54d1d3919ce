"""Memory: the last M inputs of every layer, in one shape, without a past to train."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.support.small_models import random_text, read_stream, small_model
from txl_dist.model.memory import Memory


def empty(mem_len: int) -> Memory:
    return Memory.empty(n_layer=2, num_lanes=3, mem_len=mem_len, d_model=4)


@settings(max_examples=60, deadline=None)
@given(mem_len=st.integers(0, 9), tgt_lens=st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_it_holds_the_last_tokens_of_all_segments_so_far(mem_len: int, tgt_lens: list[int]) -> None:
    memory = empty(mem_len)
    read = list(memory.layers)
    for tgt_len in tgt_lens:
        inputs = [torch.randn(3, tgt_len, 4) for _ in range(2)]
        memory = memory.after(inputs)
        read = [torch.cat(pair, dim=1) for pair in zip(read, inputs, strict=True)]
        for layer, everything in zip(memory.layers, read, strict=True):
            assert layer.shape == (3, mem_len, 4)
            assert torch.equal(layer, everything[:, everything.shape[1] - mem_len :])


@pytest.mark.parametrize("tgt_len", [2, 5, 9])
def test_it_keeps_nothing_else_alive(tgt_len: int) -> None:
    for layer in empty(5).after([torch.randn(3, tgt_len, 4)] * 2).layers:
        assert layer.untyped_storage().nbytes() == layer.numel() * layer.element_size()


@pytest.mark.parametrize("mem_len", [0, 2, 4, 7])
def test_the_model_returns_the_shape_it_was_given(mem_len: int) -> None:
    model = small_model(mem_len=mem_len)
    _, memory = read_stream(model, random_text(3, 9), tgt_len=4)
    assert [layer.shape for layer in memory.layers] == [(3, mem_len, 6)] * 2


def test_no_gradient_passes_into_the_memory() -> None:
    model, text_BN = small_model(mem_len=5), random_text(3, 9)
    with torch.no_grad():
        _, unrecorded = read_stream(model, text_BN[:, :5], tgt_len=4)
    _, memory = read_stream(model, text_BN[:, :5], tgt_len=4)
    assert not any(layer.requires_grad for layer in memory.layers)

    gradients = []
    for past in (unrecorded, memory):
        age_BT = torch.arange(4, 8).expand(3, 4)
        nats_BT, _ = model(text_BN[:, 4:8], text_BN[:, 5:9], age_BT, past)
        gradients.append(torch.autograd.grad(nats_BT.sum(), list(model.parameters())))
    # Close, not equal: without gradients attention has another form.
    assert_close(*gradients)


def test_an_empty_memory_is_like_the_parameters() -> None:
    model = small_model(mem_len=5, n_layer=3)
    for layer in model.empty_memory(4).layers:
        assert (layer.shape, layer.dtype) == ((4, 5, 6), torch.float64)
    assert len(model.empty_memory(4).layers) == 3
