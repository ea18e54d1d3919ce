"""A batch of prompts: every lane gets the logits and the tokens that it would get alone."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.support.hypothesis_examples import examples
from tests.support.small_models import random_text, small_model
from txl_dist.generation.batch_decoder import BatchDecoder
from txl_dist.generation.options import Sampling
from txl_dist.model.transformer_xl import TransformerXL

TGT_LEN = 4
OPTIONS = [
    {"mem_len": 6, "same_length": True, "clamp_len": 3},
    {"mem_len": 3, "distance_encoding": "shaw", "clamp_len": 4},
    {"mem_len": 7, "distance_encoding": "rotary", "attention": "sdpa"},
    {"mem_len": 5, "distance_encoding": "alibi", "attention": "cpu"},
    {"mem_len": 0},
    {"mem_len": 0, "distance_encoding": "absolute"},
]
FREELY, GREEDILY = Sampling(), Sampling(temperature=0)


def prompts_of(lengths: list[int]) -> list[list[int]]:
    return [random_text(1, length, seed=n)[0].tolist() for n, length in enumerate(lengths)]


def decoder_of(
    model: TransformerXL, prompts: list[list[int]], seeds: list[int], sampling: Sampling = FREELY
) -> BatchDecoder:
    return BatchDecoder(model, prompts, seeds=seeds, tgt_len=TGT_LEN, sampling=sampling)


def drawn(decoder: BatchDecoder, num_draws: int) -> list[list[int]]:
    """Tokens of each lane."""
    return [list(lane) for lane in zip(*(decoder.draw() for _ in range(num_draws)), strict=True)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_lane_is_that_of_its_prompt_alone(
    options: dict[str, Any], seen: list[Tensor]
) -> None:
    """Prompts of one to four segments, with last segments of different lengths."""
    model, prompts, seeds = small_model(**options), prompts_of([1, 9, 15, 4]), [5, 3, 8, 5]
    together = drawn(decoder_of(model, prompts, seeds), 7)
    logits_BNV = torch.stack(seen).unflatten(0, (7, 4)).transpose(0, 1)
    for lane, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        seen.clear()
        (alone,) = drawn(decoder_of(model, [prompt], [seed]), 7)
        assert together[lane] == alone
        assert_close(logits_BNV[lane], torch.stack(seen))


@examples(15)
@given(data=st.data(), options=st.sampled_from(OPTIONS))
def test_lanes_that_are_dropped_change_nothing_for_the_others(
    data: st.DataObject, options: dict[str, Any]
) -> None:
    model = small_model(**options)
    lengths = data.draw(st.lists(st.integers(1, 11), min_size=1, max_size=4))
    prompts = prompts_of(lengths)
    decoder, lanes = (
        decoder_of(model, prompts, list(range(len(prompts)))),
        list(range(len(prompts))),
    )
    tokens: list[list[int]] = [[] for _ in prompts]
    while lanes:
        for lane, token in zip(lanes, decoder.draw(), strict=True):
            tokens[lane].append(token)
        kept = data.draw(st.lists(st.sampled_from(range(len(lanes))), unique=True))
        decoder.keep(kept)
        lanes = [lanes[index] for index in kept]
    for lane, prompt in enumerate(prompts):
        (alone,) = drawn(decoder_of(model, [prompt], [lane]), len(tokens[lane]))
        assert tokens[lane] == alone


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_token_by_token_equals_one_pass_while_the_memory_holds_the_text(
    options: dict[str, Any], seen: list[Tensor]
) -> None:
    model = small_model(**(options | {"mem_len": 40}))
    (text,) = drawn(decoder_of(model, [[2]], [0]), 30)
    memory = small_model(**(options | {"mem_len": 0, "same_length": False})).empty_memory(1)
    if options.get("same_length"):  # which needs a memory, here of more tokens than the text
        memory = model.empty_memory(1)
    with torch.no_grad():
        hidden_BTD, _ = model.hidden(torch.tensor([[2, *text]]), torch.arange(31)[None], memory)
        one_pass_NV = model.logits(hidden_BTD)[0]
    assert_close(torch.stack(seen), one_pass_NV[:-1])


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_past_the_memory_it_equals_a_memory_that_reads_the_same_segments(
    options: dict[str, Any], seen: list[Tensor]
) -> None:
    """The reference of the model: `Memory`, which is projected again for every segment."""
    model, (prompt,) = small_model(**options), prompts_of([10])
    (new_tokens,) = drawn(decoder_of(model, [prompt], [0]), 3 * model.config.mem_len)
    text, memory, logits = torch.tensor([prompt + new_tokens]), model.empty_memory(1), []
    first = 0
    for num_tokens in [4, 4, 2, *[1] * (len(new_tokens) - 1)]:
        here = slice(first, first + num_tokens)
        with torch.no_grad():
            hidden_BTD, memory = model.hidden(text[:, here], torch.arange(1000)[None, here], memory)
            logits.append(model.logits(hidden_BTD)[0, -1])
        first += num_tokens
    assert_close(torch.stack(seen), torch.stack(logits[2:]))


def test_single_precision_gives_the_same_greedy_tokens() -> None:
    """Products of another batch size may round differently, which changes no choice here."""
    model, prompts = small_model(mem_len=6, seed=29).float(), prompts_of([1, 9, 4, 15])
    together = drawn(decoder_of(model, prompts, [0] * 4, GREEDILY), 20)
    alone = [drawn(decoder_of(model, [prompt], [0], GREEDILY), 20)[0] for prompt in prompts]
    assert together == alone
    assert len(set().union(*together)) > 4
