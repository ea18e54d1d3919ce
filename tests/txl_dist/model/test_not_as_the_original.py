"""Defects of the original and its descendants that are not here (docs/decisions/0007)."""

import pytest
import torch
from torch import Tensor

from tests.support.small_models import random_text, small_model
from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import TransformerXL


def read(
    model: TransformerXL, memory: Memory, *, start: int, tgt_len: int
) -> tuple[Tensor, Memory]:
    """Nats and memory of one segment, `start` tokens into two streams."""
    text_BN = random_text(2, tgt_len + 1, seed=start)
    age_BT = torch.arange(start, start + tgt_len).expand(2, tgt_len)
    return model(text_BN[:, :-1], text_BN[:, 1:], age_BT, memory)


def filled(model: TransformerXL) -> Memory:
    """A memory whose every number is different."""
    empty = model.empty_memory(2)
    return Memory(tuple(torch.randn_like(layer) for layer in empty.layers))


@pytest.mark.parametrize("attention", ["reference", "fused"])
def test_reading_a_segment_leaves_the_memory_it_was_given_alone(attention: str) -> None:
    model = small_model(attention=attention)
    memory = filled(model)
    before = [layer.clone() for layer in memory.layers]
    _, after = read(model, memory, start=9, tgt_len=3)
    for layer in after.layers:
        layer.zero_()
    assert all(map(torch.equal, memory.layers, before))


@pytest.mark.parametrize("attention", ["reference", "fused"])
def test_nobody_looks_at_the_zeros_of_an_empty_memory(attention: str) -> None:
    model = small_model(attention=attention)
    with_zeros, _ = read(model, model.empty_memory(2), start=0, tgt_len=3)
    without_BT, _ = read(
        small_model(attention=attention, mem_len=0), no_memory(), start=0, tgt_len=3
    )
    torch.testing.assert_close(with_zeros, without_BT, rtol=0, atol=1e-12)
    attended, _ = read(model, model.empty_memory(2), start=5, tgt_len=3)
    unattended, _ = read(model, filled(model), start=5, tgt_len=3)
    assert not torch.equal(attended, unattended), "further into a stream it is looked at"


def no_memory() -> Memory:
    return small_model(mem_len=0).empty_memory(2)


def test_there_is_one_memory_a_layer_and_none_of_the_last_output() -> None:
    model = small_model(n_layer=3)
    _, memory = read(model, model.empty_memory(2), start=0, tgt_len=4)
    assert len(memory.layers) == 3
    table_BTD = model.table(random_text(2, 5, seed=0)[:, :-1])
    torch.testing.assert_close(memory.layers[0][:, -4:], table_BTD)
