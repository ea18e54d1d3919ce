"""Memory: the last M inputs of each layer, in a constant shape and without gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.support.small_models import random_text, small_model
from txl_dist.model.config import ModelConfig
from txl_dist.model.memory import memory_kind
from txl_dist.model.memory.recurrent import Recurrent, RecurrentMemory
from txl_dist.model.transformer_xl import TransformerXL

AGES = torch.zeros(1, 1, dtype=torch.int32)
"""Not used: a row of the oldest tokens is removed whatever their ages are."""


def empty(mem_len: int) -> RecurrentMemory:
    config = ModelConfig(n_layer=2, mem_len=mem_len, d_model=4)
    return Recurrent(config).empty(3)


@settings(max_examples=60, deadline=None)
@given(mem_len=st.integers(0, 9), tgt_lens=st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_it_holds_the_last_tokens_of_all_segments(mem_len: int, tgt_lens: list[int]) -> None:
    memory = empty(mem_len)
    read = list(memory.layers)
    for tgt_len in tgt_lens:
        inputs = [torch.randn(3, tgt_len, 4) for _ in range(2)]
        memory = memory.after([*inputs, inputs[0]], AGES)
        read = [torch.cat(pair, dim=1) for pair in zip(read, inputs, strict=True)]
        for layer, all_inputs in zip(memory.layers, read, strict=True):
            assert layer.shape == (3, mem_len, 4)
            assert torch.equal(layer, all_inputs[:, all_inputs.shape[1] - mem_len :])


configs = st.fixed_dictionaries(
    {
        "memory": st.sampled_from(["recurrent", "recurrent+tokens"]),
        "mem_len": st.integers(1, 5),
        "mem_shares": st.sampled_from([(), (0.4, 1.0), (1.0, 0.4)]),
        "memory_tokens": st.integers(1, 2),
    }
).map(lambda options: ModelConfig(n_layer=2, d_model=4, **options))


@settings(max_examples=60, deadline=None)
@given(saved=configs, config=configs)
def test_a_row_that_fits_has_all_tokens_of_every_layer_and_its_newest_are_loaded(
    saved: ModelConfig, config: ModelConfig
) -> None:
    is_long = all(map(int.__ge__, saved.mem_lens, config.mem_lens))
    has_tokens = config.memory == "recurrent" or saved.memory_tokens == config.memory_tokens
    fits = memory_kind(config).fits(saved)
    assert fits == (saved.memory == config.memory and is_long and has_tokens)
    if not fits:
        return
    state = memory_kind(config).empty(2)
    row = memory_kind(saved).empty(1).row(0)
    row = {name: torch.randn_like(tensor) for name, tensor in row.items()}
    state.load_row(1, row)
    for name, tensor in state.row(1).items():
        assert torch.equal(tensor, row[name][len(row[name]) - len(tensor) :])
        assert not state.row(0)[name].any()


@pytest.mark.parametrize("tgt_len", [2, 5, 9])
def test_it_does_not_keep_other_activations_alive(tgt_len: int) -> None:
    for layer in empty(5).after([torch.randn(3, tgt_len, 4)] * 3, AGES).layers:
        assert layer.untyped_storage().nbytes() == layer.numel() * layer.element_size()


def test_an_empty_memory_has_the_dtype_of_the_parameters() -> None:
    model = small_model(mem_len=5, n_layer=3)
    for layer in model.empty_memory(4).layers:
        assert (layer.shape, layer.dtype) == ((4, 5, 6), torch.float64)
    assert len(model.empty_memory(4).layers) == 3


# --- defects of the original that are absent here (docs/decisions/0007) ---------------------------


def read_segment(
    model: TransformerXL, memory: RecurrentMemory, *, start: int, tgt_len: int
) -> tuple[Tensor, RecurrentMemory]:
    """Nats and memory of one segment, `start` tokens into two streams."""
    text_BN = random_text(2, tgt_len + 1, seed=start)
    age_BT = torch.arange(start, start + tgt_len).expand(2, tgt_len)
    return model(text_BN[:, :-1], text_BN[:, 1:], age_BT, memory)


def filled(model: TransformerXL) -> RecurrentMemory:
    """A memory of random numbers."""
    empty = model.empty_memory(2)
    return RecurrentMemory(tuple(torch.randn_like(layer) for layer in empty.layers))


@pytest.mark.parametrize("attention", ["reference", "cpu"])
def test_the_model_does_not_change_the_memory_in_place(attention: str) -> None:
    model = small_model(attention=attention)
    memory = filled(model)
    before = [layer.clone() for layer in memory.layers]
    _, after = read_segment(model, memory, start=9, tgt_len=3)
    for layer in after.layers:
        layer.zero_()
    assert all(map(torch.equal, memory.layers, before))


def test_there_is_one_memory_per_layer_and_none_of_the_last_output() -> None:
    model = small_model(n_layer=3)
    _, memory = read_segment(model, model.empty_memory(2), start=0, tgt_len=4)
    assert len(memory.layers) == 3
    table_BTD = model.table(random_text(2, 5, seed=0)[:, :-1])
    assert_close(memory.layers[0][:, -4:], table_BTD)


@pytest.mark.parametrize("tgt_len", [3, 5, 9])
def test_it_may_be_stored_in_another_dtype_than_the_models(tgt_len: int) -> None:
    """Each layer reads the stored values, so storing them rounded is the only difference."""
    model, text_BN = small_model(mem_len=5).float(), random_text(3, 2 * tgt_len + 1)
    stored = model.empty_memory(3, dtype=torch.bfloat16)
    age_BT = torch.arange(tgt_len).expand(3, tgt_len)
    text = text_BN[:, :tgt_len], text_BN[:, 1 : tgt_len + 1]
    _, exact = model(*text, age_BT, model.empty_memory(3))
    _, stored = model(*text, age_BT, stored)
    assert {layer.dtype for layer in stored.layers} == {torch.bfloat16}
    for layer, exact_layer in zip(stored.layers, exact.layers, strict=True):
        assert torch.equal(layer, exact_layer.bfloat16())

    rounded = RecurrentMemory(tuple(layer.float() for layer in stored.layers))
    text = text_BN[:, tgt_len:-1], text_BN[:, tgt_len + 1 :]
    nats_BT, _ = model(*text, age_BT + tgt_len, stored)
    expected_BT, _ = model(*text, age_BT + tgt_len, rounded)
    assert torch.equal(nats_BT, expected_BT)
