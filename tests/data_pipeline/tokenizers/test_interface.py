"""All tokenizers: the shared interface, and cut texts that give the tokens of the whole."""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data_pipeline.shards.manifest import PrepareSettings
from data_pipeline.tokenizers import ByteTokenizer, Tokenizer, cuts_of, token_dtype, train_tokenizer
from data_pipeline.tokenizers.ids import IdTokenizer
from data_pipeline.tokenizers.interface import text_parts
from data_pipeline.tokenizers.pretrained import HARD_STRINGS, from_library_json
from tests.data_pipeline.tokenizers.sample_tokenizers import (
    CHAR,
    LM1B,
    TOKENIZER,
    WORD,
    with_unknown_as_only_special,
)
from tests.support.hypothesis_examples import examples

LIBRARY = from_library_json(
    json.loads(with_unknown_as_only_special("unigram").to_str()), source="test"
)
WITH_UNKNOWN = {
    "char": train_tokenizer(CHAR, lambda: iter(["the cat\n"])),
    "word": train_tokenizer(WORD, lambda: iter(["the cat <unk> sat\n"])),
    "word of lm1b": train_tokenizer(LM1B, lambda: iter(["the cat\n"])),
}


@pytest.mark.parametrize("kind", WITH_UNKNOWN)
@examples(60)
@given(
    parts=st.lists(
        st.sampled_from([*"the cat\n", "the", " cat ", "dog", "é", "漢 ", " <unk> ", " dog\n"])
    )
)
def test_unknown_symbols_are_those_that_share_one_id(kind: str, parts: list[str]) -> None:
    """A symbol alone has the unknown id if and only if it is named; none is left out."""
    tokenizer, text = WITH_UNKNOWN[kind], "".join(parts)
    unknown = tokenizer.unknown_symbols(text)
    (id_,) = set(tokenizer.encode("漢").tolist()) - set(tokenizer.encode("\n").tolist())
    symbols = text if kind == "char" else text.split()
    is_unknown = [symbol != "<unk>" and id_ in tokenizer.encode(symbol) for symbol in symbols]
    expected = Counter(s for s, unknown in zip(symbols, is_unknown, strict=True) if unknown)
    assert unknown == expected
    literal = 0 if kind == "char" else text.split().count("<unk>")
    assert (tokenizer.encode(text) == id_).sum() == unknown.total() + literal


def test_a_file_of_the_library_has_unknown_symbols_too() -> None:
    assert LIBRARY.unknown_symbols("the 漢 cat 漢") == {"漢": 2}


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), TOKENIZER, IdTokenizer(9, 0, {})])
def test_nothing_is_unknown_where_every_text_has_ids_or_is_refused(tokenizer: Tokenizer) -> None:
    assert tokenizer.unknown_symbols("漢 \x00 naïve") == {}


def test_the_token_type_is_the_smallest_that_holds_the_vocabulary() -> None:
    assert token_dtype(2**16) == np.uint16
    assert token_dtype(2**16 + 1) == np.uint32


SAMPLE = "The cat's mat; don't  sit!!\n\n  99 cats,\tΩméga 潮は !\x1c\r\n" * 9
SETTINGS = {
    "char": PrepareSettings(tokenizer="char"),
    "word": PrepareSettings(tokenizer="word"),
    "lm1b": PrepareSettings(tokenizer="word", recipe="lm1b"),
    "bpe": PrepareSettings(tokenizer="bpe", vocab_size=400),
}
TOKENIZERS: dict[str, Tokenizer] = {"byte": ByteTokenizer()} | {
    name: train_tokenizer(settings, lambda: iter([SAMPLE])) for name, settings in SETTINGS.items()
}
# What decides where GPT-2's pattern and Python's split() part: rare kinds of blanks among others.
texts = st.text(alphabet="aé1!' \t\n\r\x1c\x85\u00a0\u2028\u200b" + "tsl" * 3, max_size=60)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=texts | st.sampled_from(HARD_STRINGS), max_chars=st.integers(1, 40))
@example(text="a!\x1cbc", max_chars=3)  # a blank to Python, but not to GPT-2's pattern
def test_joined_tokens_of_pieces_are_the_tokens_of_the_whole(
    name: str, text: str, max_chars: int
) -> None:
    tokenizer = TOKENIZERS[name]
    pieces = list(text_parts([text], max_chars=max_chars, cuts=tokenizer.cuts))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= max_chars for piece in pieces)
    if not any(
        len(piece) == max_chars and not is_harmless(piece, following, tokenizer.cuts)
        for piece, following in pairwise(pieces)
    ):
        ids = [tokenizer.encode(piece) for piece in pieces]
        assert (
            np.concatenate([*ids, tokenizer.encode("")]).tolist() == tokenizer.encode(text).tolist()
        )


def is_harmless(piece: str, following: str, cuts: str) -> bool:
    """Whether a cut is one the module promises. A piece shorter than it may be is never forced."""
    if cuts == "space":
        return not piece[-1].isspace() and following[0] in " \t\n\r"
    return cuts == "anywhere" or piece.endswith("\n")


@pytest.mark.parametrize("cuts", ["anywhere", "space", "line", "never"])
@given(chunks=st.lists(texts, max_size=8), max_chars=st.integers(1, 50))
@example(chunks=["ab c", "", " d"], max_chars=4)
def test_pieces_do_not_depend_on_how_the_text_came(
    cuts: str, chunks: list[str], max_chars: int
) -> None:
    pieces = list(text_parts(iter(chunks), max_chars=max_chars, cuts=cuts))
    assert pieces == list(text_parts(["".join(chunks)], max_chars=max_chars, cuts=cuts))
    assert pieces == list(text_parts("".join(chunks), max_chars=max_chars, cuts=cuts))


def test_the_last_harmless_place_is_taken_and_else_the_limit() -> None:
    assert list(text_parts(["ab cd  efghij"], max_chars=7)) == ["ab cd", "  efghi", "j"]
    assert list(text_parts(["a\nb\ncdef"], max_chars=5, cuts="line")) == ["a\nb\n", "cdef"]
    assert list(text_parts(["", ""], max_chars=5)) == []


@pytest.mark.parametrize("name", SETTINGS)
def test_cuts_are_known_before_training(name: str) -> None:
    assert cuts_of(SETTINGS[name]) == TOKENIZERS[name].cuts


@pytest.mark.parametrize("name", TOKENIZERS)
@given(batch=st.lists(texts | st.sampled_from(HARD_STRINGS), max_size=5))
def test_a_batch_has_the_tokens_of_each_of_its_texts(name: str, batch: list[str]) -> None:
    tokens, lengths = TOKENIZERS[name].encode_batch(batch)
    parts = np.split(tokens, np.cumsum(lengths)[:-1]) if batch else []
    expected = [TOKENIZERS[name].encode(text) for text in batch]
    assert [part.tolist() for part in parts] == [part.tolist() for part in expected]
    assert tokens.dtype == TOKENIZERS[name].encode("").dtype
    assert tokens.ndim == 1
