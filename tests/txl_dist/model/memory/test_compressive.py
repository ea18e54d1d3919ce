"""`model.memory: compressive`: slots are the means of the equations, and hide other documents."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.support.hypothesis_examples import examples
from tests.support.small_models import random_text, small_model
from tests.support.written_out import assert_losses, attend
from txl_dist.model.config import ModelConfig
from txl_dist.model.memory import memory_kind
from txl_dist.model.transformer_xl import TransformerXL

B, D = 2, 4
sizes = st.fixed_dictionaries(
    {
        "mem_len": st.integers(1, 7),
        "compressed_len": st.integers(0, 4),
        "compression_rate": st.integers(2, 5),
    }
)


def config(**options: Any) -> ModelConfig:
    return ModelConfig(memory="compressive", n_layer=2, d_model=D, **options)


def token(position: int, layer: int) -> Tensor:
    """The input of a layer, [B, D]; zeros before the start of a stream."""
    if position < 0:
        return torch.zeros(B, D)
    return torch.randn(B, D, generator=torch.Generator().manual_seed(7 * position + layer))


def slots_and_recent(
    num_tokens: int, layer: int, *, mem_len: int, compressed_len: int, compression_rate: int
) -> tuple[list[Tensor], list[Tensor]]:
    """After `num_tokens` tokens: what the equations of the paper say, token by token."""
    # Blocks are counted from the zeros that fill an empty memory.
    leaving = [*range(-mem_len, num_tokens - mem_len)]
    num_blocks = len(leaving) // compression_rate
    blocks = [
        leaving[number * compression_rate : (number + 1) * compression_rate]
        for number in range(num_blocks)
    ]
    means = [torch.stack([token(at, layer) for at in block]).mean(0) for block in blocks]
    means = [torch.zeros(B, D)] * compressed_len + means
    num_recent = mem_len + compression_rate - 1
    recent = [token(at, layer) for at in range(num_tokens - num_recent, num_tokens)]
    return means[len(means) - compressed_len :], recent


@examples(60)
@given(sizes=sizes, tgt_lens=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_the_state_is_that_of_the_equations_for_any_segments(
    sizes: dict[str, int], tgt_lens: list[int]
) -> None:
    state, position = memory_kind(config(**sizes)).empty(B), 0
    for tgt_len in tgt_lens:
        segment = range(position, position + tgt_len)
        hidden = [torch.stack([token(at, layer) for at in segment], dim=1) for layer in range(2)]
        state = state.after([*hidden, hidden[0]], torch.tensor([segment]).expand(B, -1))
        position += tgt_len
    assert state.tensors()["pending"].tolist() == [position % sizes["compression_rate"]] * B
    for layer in range(2):
        slots, recent = slots_and_recent(position, layer, **sizes)
        keys_BMD = state.past(layer, torch.zeros(B, 1, D))
        assert_close(keys_BMD, torch.stack([*slots, *recent], dim=1))


@examples(20)
@given(sizes=sizes)
def test_the_oldest_token_that_counts_is_the_one_that_the_state_names(
    sizes: dict[str, int],
) -> None:
    """After a step that was skipped, no token may read one from before it."""
    state, num_tokens, distances = memory_kind(config(**sizes)).empty(1), 40, []
    x_BND = torch.ones(1, num_tokens, D, requires_grad=True)
    for number in range(num_tokens):  # one at a time, so at all places of a block
        state = state.after([x_BND[:, number : number + 1]] * 3, torch.tensor([[number]]))
        if number >= num_tokens - sizes["compression_rate"]:
            (gradient,) = torch.autograd.grad(state.past(0, x_BND).sum(), x_BND, retain_graph=True)
            distances.append(number + 1 - int(gradient[0].any(-1).nonzero()[0]))
    assert max(distances) == state.num_past_tokens


@examples(60)
@given(
    sizes=sizes,
    num_read=st.integers(0, 30),
    tgt_len=st.integers(1, 5),
    documents=st.lists(st.integers(0, 40), min_size=B, max_size=B),
)
def test_a_query_sees_the_slots_that_are_wholly_of_its_document(
    sizes: dict[str, int], num_read: int, tgt_len: int, documents: list[int]
) -> None:
    """`documents`: how many tokens before the segment the document of a lane has."""
    mem_len, num_slots, rate = sizes["mem_len"], sizes["compressed_len"], sizes["compression_rate"]
    kind = memory_kind(config(**sizes))
    state = kind.empty(B)
    if num_read:
        x_BTD = torch.zeros(B, num_read, D)
        state = state.after([x_BTD] * 3, torch.zeros(B, num_read, dtype=torch.int64))
    num_recent, pending = mem_len + rate - 1, num_read % rate
    age_BT = torch.tensor(documents)[:, None] + torch.arange(tgt_len)
    reach_BT = state.reach(age_BT)
    for lane in range(B):
        for t in range(tgt_len):
            age = int(age_BT[lane, t])
            oldest = list(range(t + num_recent + 1))  # distance of each key's oldest token
            oldest += [t + mem_len + pending + rate * (slot + 1) for slot in range(num_slots)]
            seen = [distance <= age for distance in oldest]
            assert [key <= reach_BT[lane, t] for key in range(len(oldest))] == seen


def by_hand(model: TransformerXL, text_N: Tensor, age: list[int], tgt_len: int) -> Tensor:
    """Nats of one lane, with the attention of every token computed by itself."""
    config, num_layers = model.config, len(model.layers)
    mem_len, rate = config.mem_len, config.compression_rate
    inputs: list[list[Tensor]] = [[] for _ in model.layers]
    slots: list[range] = []  # positions of their tokens; those before the stream have no tokens
    next_slot = -mem_len
    nats = []
    for start in range(0, len(age), tgt_len):
        stop = start + tgt_len
        x_TD = model.embed(text_N[None, start:stop])[0]
        recent = range(max(0, start - mem_len - rate + 1), start)
        for number in range(num_layers):
            inputs[number] += [*x_TD]
            outputs = []
            for position in range(start, stop):
                document = range(position - age[position], position + 1)
                whole = [slot for slot in slots if slot[0] in document and slot[-1] in document]
                rows = [sum(inputs[number][at] for at in slot) / rate for slot in whole]
                rows += [inputs[number][at] for at in recent if at in document]
                rows += [inputs[number][at] for at in range(start, position + 1) if at in document]
                outputs.append(attend(model, model.layers[number], torch.stack(rows)))
            x_TD = torch.stack(outputs)
        target_1T = text_N[None, start + 1 : stop + 1]
        nats.append(model.softmax(model.output(x_TD)[None], target_1T, model.table)[0])
        if age[start] == 0:
            next_slot = start - mem_len
        while next_slot + rate <= stop - mem_len:
            slots = [*slots, range(next_slot, next_slot + rate)][-config.compressed_len :]
            next_slot += rate
    return torch.cat(nats)


@pytest.mark.parametrize("rate", [2, 3])
@pytest.mark.parametrize("options", [{}, {"pre_lnorm": True, "norm": "rmsnorm"}], ids=str)
@torch.no_grad()
def test_losses_are_those_of_attention_written_out(options: dict[str, Any], rate: int) -> None:
    model = small_model(
        memory="compressive", compressed_len=2, **options | {"compression_rate": rate}
    )
    assert_losses(model, partial(by_hand, model, tgt_len=4), tgt_len=4, num_segments=6)


@torch.no_grad()
def test_a_text_that_begins_at_a_segment_is_read_as_in_an_empty_memory() -> None:
    """Blocks begin there again, however many tokens of another text wait for theirs."""
    model = small_model(memory="compressive", mem_len=4, compressed_len=3, compression_rate=3)
    text_BN, states = random_text(1, 13), [model.empty_memory(1), model.empty_memory(1)]
    other_BT = random_text(1, 5, seed=7)
    _, states[1] = model(other_BT, other_BT, torch.arange(5)[None], states[1])
    for start in range(0, 12, 2):
        here, age_BT = slice(start, start + 2), torch.arange(start, start + 2)[None]
        targets_BT = text_BN[:, start + 1 : start + 3]
        results = [model(text_BN[:, here], targets_BT, age_BT, state) for state in states]
        (nats_BT, states[0]), (others_BT, states[1]) = results
        assert torch.equal(nats_BT, others_BT)


def test_blocks_that_end_inside_segments_have_no_limited_reach() -> None:
    kind = memory_kind(config(mem_len=8, compression_rate=4))
    assert kind.empty(B).num_past == 2 + 8 + 3
    assert kind.receptive_tokens(8) == 2 * 16
    assert kind.receptive_tokens(6) is None


def test_without_a_memory_nothing_is_compressed() -> None:
    kind = memory_kind(config(mem_len=0))
    assert (kind.empty(B).num_past, kind.receptive_tokens(3)) == (0, 0)
    assert sum(x.nbytes for x in kind.empty(B).row(0).values()) == 4  # the count


def test_a_memory_of_other_sizes_does_not_fit() -> None:
    kind = memory_kind(config(mem_len=8))
    assert kind.fits(config(mem_len=8, compressed_len=2))
    assert not kind.fits(config(mem_len=8, compressed_len=3))
    assert not kind.fits(ModelConfig(mem_len=8))
