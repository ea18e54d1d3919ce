"""Vocabularies of characters and words: round trips, order, what is cut, merged counts."""

import json
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.errors import DataError
from data_pipeline.preparation.settings import PrepareSettings
from data_pipeline.tokenizers import (
    load_tokenizer,
    tokenizer_of_counts,
    train_tokenizer,
)
from data_pipeline.tokenizers.recipes import RECIPES, fixed_split
from data_pipeline.tokenizers.symbol_counts import (
    count_symbols,
    counts_from_bytes,
    counts_to_bytes,
    merge_counts,
)
from data_pipeline.tokenizers.word import symbols_of

CHAR, WORD = PrepareSettings(tokenizer="char"), PrepareSettings(tokenizer="word")
LM1B = PrepareSettings(tokenizer="word", recipe="lm1b")
LINES = " the cat <eos> sat \n\n\tthe  mat <unk>\r\nthe end\n"


def collapsed(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.split("\n"))


@given(st.text())
def test_characters_of_the_training_text_come_back(text: str) -> None:
    tokenizer = train_tokenizer(CHAR, lambda: iter([text]))
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert tokenizer.end_of_document not in ids


@given(st.text(alphabet="ab<>é \n\t\u2028\x1c") | st.text())
def test_words_come_back_with_runs_of_blanks_collapsed(text: str) -> None:
    tokenizer = train_tokenizer(WORD, lambda: iter([text]))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == collapsed(text)
    assert (ids == tokenizer.encode("\n")[0]).sum() == text.count("\n")
    assert tokenizer.end_of_document not in ids


def test_symbols_stand_by_falling_count_and_ties_by_code_point() -> None:
    characters = train_tokenizer(CHAR, lambda: iter(["bba", "cc€"]))
    assert characters.decode(range(5)) == "bca€\ufffd"
    ties = train_tokenizer(WORD, lambda: iter(["! <unk> a\n"]))
    assert [ties.decode([number]) for number in range(4)] == ["\n", "!", "<unk>", "a"]
    words = train_tokenizer(WORD, lambda: iter(["b a\nb c\n", "\n"]))
    assert [words.decode([number]) for number in range(5)] == ["\n", "b", "a", "c", "<unk>"]


@pytest.mark.parametrize("limit", [{"vocab_size": 5}, {"min_freq": 2}])
def test_what_is_cut_becomes_the_unknown_and_counts_for_its_place(limit: dict[str, int]) -> None:
    text = "a a a a b b c d e\n\n"
    tokenizer = train_tokenizer(WORD.model_copy(update=limit), lambda: iter([text]))
    assert tokenizer.vocab_size == 5
    assert [tokenizer.decode([number]) for number in range(4)] == ["a", "<unk>", "\n", "b"]
    assert tokenizer.decode(tokenizer.encode(text)) == "a a a a b b <unk> <unk> <unk>\n\n"
    characters = train_tokenizer(CHAR.model_copy(update=limit), lambda: iter(["aaabbbcde"]))
    assert characters.decode(characters.encode("abcx")).startswith("ab")
    assert characters.decode(characters.encode("dx")) == "\ufffd\ufffd"


def test_lines_of_the_billion_words_are_opened_and_closed() -> None:
    tokenizer = train_tokenizer(LM1B, lambda: iter(["a b\nc d\n"]))
    mark = int(tokenizer.encode("\n")[0])
    ids = tokenizer.encode("a b\nc d\n")
    assert np.flatnonzero(ids == mark).tolist() == [0, 3, 4, 7]
    assert tokenizer.decode(ids) == "a b\nc d\n"
    assert tokenizer.encode("a b").tolist() == ids[:3].tolist(), "a prompt is not closed"
    assert tokenizer.token_bytes()[ids].sum() == len("a b\nc d\n")


def test_special_tokens_written_in_the_text_are_words() -> None:
    tokenizer = train_tokenizer(WORD, lambda: iter([LINES]))
    line_end = int(tokenizer.encode("\n")[0])
    assert line_end not in tokenizer.encode("<eos> <S> <unk>")
    assert tokenizer.decode(tokenizer.encode(LINES)) == collapsed(LINES)


@pytest.mark.parametrize("settings", [CHAR, WORD, LM1B])
@given(texts=st.lists(st.text(alphabet="ab \n€"), max_size=7), cut=st.integers(0, 7))
def test_merged_counts_are_the_counts_of_the_whole(
    settings: PrepareSettings, texts: list[str], cut: int
) -> None:
    parts = [count_symbols(settings, texts[:cut]), count_symbols(settings, texts[cut:])]
    merged = merge_counts(counts_from_bytes(counts_to_bytes(part)) for part in parts)
    assert merged == count_symbols(settings, iter(texts))
    assert counts_to_bytes(merged) == counts_to_bytes(merge_counts(reversed(parts)))
    from_texts = train_tokenizer(settings, lambda: iter(texts))
    assert tokenizer_of_counts(settings, merged).digest == from_texts.digest


@pytest.mark.parametrize("settings", [CHAR, WORD, LM1B])
def test_what_is_saved_loads_the_same(settings: PrepareSettings) -> None:
    tokenizer = train_tokenizer(settings, lambda: iter([LINES]))
    loaded = load_tokenizer(json.loads(tokenizer.to_json()))
    assert loaded.digest == tokenizer.digest
    assert loaded.to_json() == tokenizer.to_json()
    assert loaded.encode(LINES).tolist() == tokenizer.encode(LINES).tolist()
    assert loaded.opens_documents is (settings.recipe is None)
    with pytest.raises(UnicodeEncodeError, match="surrogates"):
        loaded.encode("a\ud800b")
    with pytest.raises(ValueError, match=str(loaded.vocab_size)):
        loaded.decode([loaded.vocab_size])


@pytest.mark.parametrize(
    ("settings", "symbols", "why"),
    [
        (CHAR, ["", "a", "a"], "twice"),
        (CHAR, ["", "ab"], "one character"),
        (CHAR, ["", "\ud800"], "one character"),
        (CHAR, ["a"], "missing"),
        (CHAR, ["", 3], "string"),
        (CHAR, "ab", "list"),
        (WORD, ["<unk>", "\n", "a", "a"], "twice"),
        (WORD, ["<unk>", "\n", "a b"], "one word"),
        (WORD, ["<unk>", "\n", ""], "one word"),
        (WORD, ["<unk>", "\n", "\udc00"], "surrogates"),
        (WORD, ["<unk>", "a"], "missing"),
        (WORD, ["\n", "a"], "missing"),
    ],
)
def test_a_vocabulary_that_is_none_is_refused(
    settings: PrepareSettings, symbols: object, why: str
) -> None:
    content = json.loads(train_tokenizer(settings, lambda: iter(["a"])).to_json())
    with pytest.raises(DataError, match=why):
        load_tokenizer({**content, "symbols": symbols})


def test_the_symbols_of_a_line_are_its_words_and_its_end() -> None:
    assert list(symbols_of("a b\n\nc", "end")) == [["a", "b", "\n"], ["\n"], ["c"]]
    assert list(symbols_of("a\n\n", "both")) == [["\n", "a", "\n"], ["\n", "\n"]]
    symbols = list(chain.from_iterable(symbols_of(LINES, "end")))
    assert symbols.count("\n") == LINES.count("\n")


def test_the_fixed_split_is_the_papers_for_a_hundred_million() -> None:
    parts = fixed_split(100_000_000)
    assert parts["train"] == (0, 90_000_000)
    assert parts["valid"] == (90_000_000, 95_000_000)
    assert parts["test"] == (95_000_000, 100_000_000)
    assert fixed_split(20)["test"] == (19, 20)
    with pytest.raises(ValueError, match="20"):
        fixed_split(19)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_refuses_other_tokenizers(name: str) -> None:
    legal = RECIPES[name].tokenizers
    assert PrepareSettings(tokenizer=legal[0], recipe=name).recipe == name
    with pytest.raises(ValueError, match=f"{name} is for tokenizer {legal[0]}"):
        PrepareSettings(tokenizer="bpe", vocab_size=300, recipe=name)
