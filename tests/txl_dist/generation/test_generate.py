"""Generation: the distributions are those of the model as it is evaluated, in a batch each lane is
that of its prompt alone, tokens have the configured distribution, and texts end at their limits.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from data_pipeline.shards.manifest import PrepareSettings
from data_pipeline.tokenizers import ByteTokenizer, Tokenizer, train_tokenizer
from tests.support.hypothesis_examples import examples
from tests.support.small_models import (
    MODERN,
    random_text,
    read_stream,
    recorded_memory_lens,
    small_model,
)
from txl_dist.errors import TxlError
from txl_dist.generation import generate
from txl_dist.generation.generate import (
    BatchDecoder,
    GeneratedText,
    generate_texts,
    generate_tokens,
    next_tokens,
    prompt_tokens,
)
from txl_dist.generation.text import Sampling, TextLimits, stream_text
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


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Records the logits [V] that each token is sampled from."""
    seen: list[Tensor] = []

    def recording_next_tokens(logits_BV: Tensor, *how: Any) -> list[int]:
        seen.extend(logits_BV)
        return next_tokens(logits_BV, *how)

    monkeypatch.setattr(generate, "next_tokens", recording_next_tokens)
    return seen


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


@pytest.mark.parametrize(
    "options",
    [
        {"memory": "tokens"},
        {"memory": "recurrent+tokens"},
        {"memory": "compressive"},
        {"mem_shares": (0, 1)},
    ],
    ids=str,
)
def test_a_memory_written_by_segments_gets_those_of_training(
    options: dict[str, Any], seen: list[Tensor]
) -> None:
    """Drawn tokens have the logits that they have when the text is read in whole segments; also if
    layers have no memory, which see their segment only."""
    model, (prompt,) = small_model(**options), prompts_of([6])
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


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_of_a_diverged_model_are_an_error(bad: float, temperature: float) -> None:
    with pytest.raises(TxlError, match="NaN or Inf"):
        sample(torch.tensor([0.0, bad, 3.0]), Sampling(temperature=temperature))


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


def test_an_infinite_temperature_draws_any_possible_token() -> None:
    sampling = Sampling(temperature=math.inf)
    assert set(sample(torch.tensor([1.0, -torch.inf, 9.0]), sampling)) == {0, 2}


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


# --- one prompt, and texts of many ----------------------------------------------------------------


def generated(model: TransformerXL, prompt: list[int], num_tokens: int = 9, **how) -> list[int]:
    how = {"tgt_len": TGT_LEN, "sampling": FREELY, "seed": 0} | how
    return list(islice(generate_tokens(model, prompt, **how), num_tokens))


@pytest.mark.parametrize("num_prompt", [3, 4, 5, 8, 9, 14], ids="prompt of {}".format)
def test_a_prompt_is_read_in_segments_as_in_training(num_prompt: int, seen: list[Tensor]) -> None:
    """The memory is shorter than the prompt, so segment boundaries change the result."""
    model, (prompt,) = small_model(mem_len=3), prompts_of([num_prompt])
    first_target = generated(model, prompt, 1)
    text_BN = torch.tensor([prompt + first_target])
    nats_BN, _ = read_stream(model, text_BN, tgt_len=TGT_LEN)
    assert_close(-seen[0].log_softmax(-1)[first_target], nats_BN[0, -1:])


@pytest.mark.parametrize("num_prompt", [1, 4, 5, 7, 9])
@pytest.mark.parametrize("encoding", ["absolute", "sinusoidal"])
def test_without_memory_the_last_tgt_len_tokens_are_seen_as_in_evaluation(
    num_prompt: int, encoding: str, seen: list[Tensor]
) -> None:
    """A segment of evaluation always has `tgt_len` tokens; the end is padding."""
    model = small_model(mem_len=0, distance_encoding=encoding)
    (prompt,) = prompts_of([num_prompt])
    tokens = generated(model, prompt, 3)
    for num_generated, logits_V in enumerate(seen):
        window = (prompt + tokens[:num_generated])[-TGT_LEN:]
        padded = torch.tensor([window + [0] * (TGT_LEN - len(window))])
        with torch.no_grad():
            age_BT = torch.arange(TGT_LEN)[None]
            hidden_BTD, _ = model.hidden(padded, age_BT, model.empty_memory(1))
            assert_close(logits_V, model.logits(hidden_BTD)[0, len(window) - 1])


PROMPTS = ["def f(", "", "x", "import os\nimport sys\n", "x"]
BYTES, LIMITS = ByteTokenizer(), TextLimits(max_tokens=14)
HOW: dict[str, Any] = {"tgt_len": 6, "sampling": Sampling()}


@pytest.fixture(scope="module")
def model() -> TransformerXL:
    return small_model(vocab_size=BYTES.vocab_size, mem_len=8)


def texts_of(
    model: TransformerXL,
    prompts: Sequence[str | Sequence[int]],
    *,
    limits: TextLimits = LIMITS,
    **options: Any,
) -> list[GeneratedText]:
    options = HOW | {"seed": 7} | options
    return list(generate_texts(model, BYTES, prompts, limits=limits, **options))


@pytest.mark.parametrize("batch_size", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_every_text_is_that_of_its_prompt_alone_with_its_seed(
    model: TransformerXL, batch_size: int
) -> None:
    together = texts_of(model, PROMPTS, batch_size=batch_size)
    alone = [texts_of(model, [prompt], seed=7 + i)[0] for i, prompt in enumerate(PROMPTS)]
    assert together == alone
    assert len({text.text for text in together}) == len(PROMPTS), "two of them are equal"


def test_a_text_is_what_is_streamed(model: TransformerXL) -> None:
    tokens = prompt_tokens(BYTES, "x")
    new_tokens = generate_tokens(model, tokens, seed=7, **HOW)
    streamed = "".join(stream_text(new_tokens, BYTES, LIMITS, after=tokens[-1]))
    assert texts_of(model, ["x"])[0].text == streamed


def test_a_memory_is_as_long_as_its_text_can_become(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without a window has a memory of all its positions: gigabytes for a short prompt."""
    model = small_model(vocab_size=BYTES.vocab_size, mem_len=5000, distance_encoding="rotary")
    prompts = [prompt_tokens(BYTES, prompt) for prompt in PROMPTS]
    endless = BatchDecoder(model, prompts, seeds=range(7, 7 + len(prompts)), **HOW)
    expected = drawn(endless, LIMITS.max_tokens)
    lens = recorded_memory_lens(monkeypatch)
    texts = texts_of(model, PROMPTS)
    streamed = [*generate_tokens(model, prompts[0], seed=7, max_tokens=14, **HOW)]
    assert [text.ids for text in texts] == [
        ids[: text.num_tokens] for ids, text in zip(expected, texts, strict=True)
    ]
    assert streamed == expected[0]
    assert max(lens) < max(map(len, prompts)) + LIMITS.max_tokens


def test_each_text_says_why_it_ended(model: TransformerXL) -> None:
    (free,) = texts_of(model, ["x"])
    assert (free.finish_reason, free.num_tokens) == ("length", 14)
    stop = free.text[8:10]
    (stopped,) = texts_of(model, ["x"], limits=replace(LIMITS, stop=("not there", stop)))
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index(stop)]
    new_tokens = generate_tokens(model, prompt_tokens(BYTES, "x"), seed=7, **HOW)
    tokens = list(islice(new_tokens, 14))
    limits = replace(LIMITS, stop_tokens=frozenset({tokens[9]}))
    (by_token,) = texts_of(model, ["x"], limits=limits)
    assert (by_token.finish_reason, by_token.num_tokens) == ("stop", tokens.index(tokens[9]))
    assert free.ids == tokens
    assert by_token.ids == tokens[: by_token.num_tokens]


def test_the_end_of_the_document_ends_a_text_in_a_batch_of_others(model: TransformerXL) -> None:
    unmarked = ByteTokenizer(opens_documents=False)
    tokens = list(islice(generate_tokens(model, prompt_tokens(unmarked, "x"), seed=0, **HOW), 10))
    unmarked.end_of_document = tokens[9]
    texts = list(generate_texts(model, unmarked, ["x", "y"], limits=LIMITS, seed=0, **HOW))
    assert texts[0].finish_reason == "end_of_document"
    assert texts[0].num_tokens == tokens.index(tokens[9])
    assert texts[1].finish_reason == "length"


def test_a_prompt_of_ids_is_continued_like_its_text(model: TransformerXL) -> None:
    (text,) = texts_of(model, ["def f("])
    ids = BYTES.encode("def f(").tolist()
    for prompt in (ids, [BYTES.end_of_document, *ids], [*ids, BYTES.end_of_document]):
        assert texts_of(model, [prompt]) == [text]
    for wrong, reason in (
        ([1, 257], "token id 257 at position 1 is not in the vocabulary of 257 ids"),
        ([1, BYTES.end_of_document, 2], "end-of-document id 256 at position 1 is inside"),
        ([1, "2"], '"ids" has str at position 1'),
    ):
        with pytest.raises(ValueError, match=reason):
            prompt_tokens(BYTES, wrong)  # type: ignore[arg-type]


def test_prompts_without_tokens_are_refused() -> None:
    words: Tokenizer = train_tokenizer(
        PrepareSettings(tokenizer="word", recipe="ptb"), lambda: iter(["the cat"])
    )
    model = small_model(vocab_size=words.vocab_size)
    for prompt in ("", "  "):
        with pytest.raises(ValueError, match="has no tokens"):
            list(generate_texts(model, words, ["the", prompt], limits=LIMITS, seed=0, **HOW))


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (Sampling, {"temperature": -1.0}, "temperature"),
        (Sampling, {"temperature": float("nan")}, "temperature"),
        (Sampling, {"top_k": 0}, "top_k"),
        (Sampling, {"top_p": 0.0}, "top_p"),
        (Sampling, {"top_p": 1.1}, "top_p"),
        (TextLimits, {"max_tokens": 0}, "max_tokens"),
        (TextLimits, {"max_tokens": 1, "stop": ("",)}, "empty"),
        (TextLimits, {"max_tokens": 3, "stop": "end"}, "stop='end' is one text"),
    ],
)
def test_invalid_options_are_refused(kind: type, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        kind(**options)


def test_the_symbols_that_a_prompt_loses_are_named(caplog: pytest.LogCaptureFixture) -> None:
    letters = train_tokenizer(PrepareSettings(tokenizer="char"), lambda: iter(["the cat"]))
    model = small_model(vocab_size=letters.vocab_size)
    prompts = ["the dög", "the cat", "dd"]
    limits = TextLimits(max_tokens=2)
    assert len(list(generate_texts(model, letters, prompts, limits=limits, seed=0, **HOW))) == 3
    of_first, of_last = caplog.messages
    assert "prompt 'the dög': 3 symbols" in of_first
    assert "'d' (2 times)" in of_last


def test_one_text_is_no_list_of_prompts(model: TransformerXL) -> None:
    with pytest.raises(ValueError, match="prompts='Once' is one text; give a list"):
        texts_of(model, "Once")


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("Once", r"prompt 'Once' is text; .* prompt_tokens\(tokenizer, prompt\)"),
        ([], "at least one token"),
        ([3, 257], "ids from 3 to 257: expected 0 to 256"),
        ([-1], "ids from -1"),
    ],
)
def test_a_prompt_that_is_not_token_ids_is_refused(
    model: TransformerXL, prompt: Any, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        next(generate_tokens(model, prompt, seed=0, **HOW))


def test_a_prompt_can_be_an_array(model: TransformerXL) -> None:
    prompt = BYTES.encode("import ")
    both = [
        list(islice(generate_tokens(model, ids, seed=1, **HOW), 4)) for ids in (prompt, [*prompt])
    ]
    assert both[0] == both[1]
