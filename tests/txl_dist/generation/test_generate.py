"""Generation of one prompt: the distributions are those of the model as it is evaluated.

Texts of many prompts: each is that of its prompt alone, and ends where its limits say.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from data_pipeline.shards.manifest import PrepareSettings
from data_pipeline.tokenizers import ByteTokenizer, Tokenizer, train_tokenizer
from tests.support.small_models import random_text, read_stream, small_model
from txl_dist.generation.generate import (
    GeneratedText,
    generate_texts,
    generate_tokens,
    prompt_tokens,
)
from txl_dist.generation.text import Sampling, TextLimits, stream_text
from txl_dist.model.transformer_xl import TransformerXL

TGT_LEN = 4
FREELY = Sampling()


def prompt_of(num_tokens: int) -> list[int]:
    return random_text(1, num_tokens)[0].tolist()


def generated(model: TransformerXL, prompt: list[int], num_tokens: int = 9, **how) -> list[int]:
    how = {"tgt_len": TGT_LEN, "sampling": FREELY, "seed": 0} | how
    return list(islice(generate_tokens(model, prompt, **how), num_tokens))


@pytest.mark.parametrize("num_prompt", [3, 4, 5, 8, 9, 14], ids="prompt of {}".format)
def test_a_prompt_is_read_in_segments_as_in_training(num_prompt: int, seen: list[Tensor]) -> None:
    """The memory is shorter than the prompt, so segment boundaries change the result."""
    model, prompt = small_model(mem_len=3), prompt_of(num_prompt)
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
    prompt = prompt_of(num_prompt)
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


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"max_tokens": 1, "stop": ("",)}], ids=str)
def test_invalid_limits_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"max_tokens|empty"):
        TextLimits(**options)


def test_the_symbols_that_a_prompt_loses_are_named(caplog: pytest.LogCaptureFixture) -> None:
    letters = train_tokenizer(PrepareSettings(tokenizer="char"), lambda: iter(["the cat"]))
    model = small_model(vocab_size=letters.vocab_size)
    prompts = ["the dög", "the cat", "dd"]
    limits = TextLimits(max_tokens=2)
    assert len(list(generate_texts(model, letters, prompts, limits=limits, seed=0, **HOW))) == 3
    of_first, of_last = caplog.messages
    assert "prompt 'the dög': 3 symbols" in of_first
    assert "'d' (2 times)" in of_last


def test_one_text_is_neither_a_list_of_prompts_nor_of_stop_strings(model: TransformerXL) -> None:
    with pytest.raises(ValueError, match="prompts='Once' is one text; give a list"):
        texts_of(model, "Once")
    with pytest.raises(ValueError, match="stop='end' is one text"):
        TextLimits(max_tokens=3, stop="end")  # type: ignore[arg-type]


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
