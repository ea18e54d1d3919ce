"""A batch of prompts: every lane gets the logits and the tokens that it would get alone.

Sampling: tokens have the configured distribution, and excluded tokens never occur.
"""

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.support.hypothesis_examples import examples
from tests.support.small_models import MODERN, random_text, small_model
from txl_dist.errors import TxlError
from txl_dist.generation.generate import BatchDecoder, next_tokens
from txl_dist.generation.text import Sampling
from txl_dist.model.transformer_xl import TransformerXL

TGT_LEN = 4
OPTIONS = [
    {"mem_len": 6, "same_length": True, "clamp_len": 3},
    {"mem_len": 3, "distance_encoding": "shaw", "clamp_len": 4},
    {"mem_len": 7, "distance_encoding": "rotary", "attention": "sdpa"},
    {"mem_len": 5, "distance_encoding": "alibi", "attention": "cpu"},
    MODERN["modern"],
    {"mem_len": 0},
    {"mem_len": 0, "distance_encoding": "absolute"},
    {"mem_len": 6, "memory": "compressive", "compression_rate": 2},
    {"mem_len": 5, "memory": "compressive", "compression_rate": 3, "compressed_len": 2},
    {"mem_len": 5, "memory": "recurrent+tokens"},
    {"memory": "tokens"},
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
    lanes = list(range(len(prompts)))
    decoder = decoder_of(model, prompts, lanes)
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


@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
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


@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
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


@pytest.mark.parametrize("kind", ["tokens", "recurrent+tokens", "compressive"])
def test_a_memory_written_by_segments_gets_those_of_training(kind: str, seen: list[Tensor]) -> None:
    """Drawn tokens have the logits that they have when the text is read in whole segments."""
    model, (prompt,) = small_model(memory=kind), prompts_of([6])
    (new_tokens,) = drawn(decoder_of(model, [prompt], [0]), 15)
    text_BN, memory, logits = torch.tensor([prompt + new_tokens]), model.empty_memory(1), []
    for here in (slice(start, start + TGT_LEN) for start in range(0, 20, TGT_LEN)):
        with torch.no_grad():
            age_BT = torch.arange(20)[None, here]
            hidden_BTD, memory = model.hidden(text_BN[:, here], age_BT, memory)
            logits.append(model.logits(hidden_BTD)[0])
    assert_close(torch.stack(seen), torch.cat(logits)[len(prompt) - 1 :])


def test_single_precision_gives_the_same_greedy_tokens() -> None:
    """Products of another batch size may round differently, which changes no choice here."""
    model, prompts = small_model(mem_len=6, seed=29).float(), prompts_of([1, 9, 4, 15])
    together = drawn(decoder_of(model, prompts, [0] * 4, GREEDILY), 20)
    alone = [drawn(decoder_of(model, [prompt], [0], GREEDILY), 20)[0] for prompt in prompts]
    assert together == alone
    assert len(set().union(*together)) > 4


logits = st.lists(st.one_of(st.floats(-8, 8), st.sampled_from([0.0, 1.0])), min_size=1, max_size=9)


def sample(logits_V: Tensor, sampling: Sampling, num_samples: int = 60) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    draws = (next_tokens(logits_V[None], sampling, [generator]) for _ in range(num_samples))
    return [token for (token,) in draws]


@given(logits=logits)
def test_temperature_0_takes_the_most_likely_token(logits: list[float]) -> None:
    logits_V = torch.tensor(logits)
    for token in sample(logits_V, Sampling(temperature=0, top_k=3, top_p=0.5), num_samples=3):
        assert logits_V[token] == logits_V.max()


@given(logits=logits, top_k=st.integers(1, 10))
@example(logits=[0.0, 0.0, 1.0, 1.2013333618494839e-45, 1.0], top_k=3)
def test_top_k_samples_from_k_tokens_also_with_ties(logits: list[float], top_k: int) -> None:
    logits_V = torch.tensor(logits)
    sampled = set(sample(logits_V, Sampling(temperature=3.0, top_k=top_k)))
    assert len(sampled) <= top_k
    likeliest = logits_V.sort(descending=True).values[:top_k]
    assert all(logits_V[token] >= likeliest[-1] for token in sampled)


def test_top_p_is_taken_after_temperature_and_top_k() -> None:
    logits_V = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    of_two = Sampling(top_k=2, top_p=0.5)  # 4/7 and 3/7: the first alone reaches 0.5
    assert set(sample(logits_V, of_two)) == {0}
    hot = Sampling(temperature=100.0, top_p=0.5)  # nearly a quarter each
    assert set(sample(logits_V, hot)) <= {0, 1, 2}
    assert {0, 1} <= set(sample(logits_V, hot))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_k=5, top_p=0.9)])
def test_every_lane_draws_as_torch_multinomial_does_with_its_generator(sampling: Sampling) -> None:
    """So the texts of a seed are those of earlier versions."""
    logits_BV = torch.randn(3, 41, generator=torch.Generator().manual_seed(1))
    generators = [torch.Generator().manual_seed(seed) for seed in (7, 7, 8)]
    draws = [next_tokens(logits_BV, sampling, generators) for _ in range(5)]
    for lane, seed in enumerate((7, 7, 8)):
        generator = torch.Generator().manual_seed(seed)
        probability_V = _tempered(logits_BV[lane], sampling)
        expected = [int(torch.multinomial(probability_V, 1, generator=generator)) for _ in draws]
        assert [drawn[lane] for drawn in draws] == expected


def _tempered(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities after top-k, temperature and top-p, one lane at a time."""
    scaled_V = (logits_V.double() - logits_V.max()) / sampling.temperature
    if sampling.top_k:
        scaled_V[logits_V < logits_V.sort().values[-sampling.top_k]] = -torch.inf
    probability_V = scaled_V.softmax(-1)
    if sampling.top_p:
        ordered_V, token_V = probability_V.sort(descending=True)
        is_dropped_V = ordered_V.cumsum(-1) - ordered_V >= sampling.top_p
        probability_V[token_V[is_dropped_V]] = 0
    return probability_V


@pytest.mark.parametrize("logit", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_refused(logit: float) -> None:
    with pytest.raises(TxlError, match="NaN or Inf"):
        sample(torch.tensor([0.0, logit]), Sampling())


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0},
     {"top_p": 1.1}],
    ids=str,
)  # fmt: skip
def test_invalid_options_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Sampling(**options)
