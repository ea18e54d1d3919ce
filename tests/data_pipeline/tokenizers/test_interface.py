"""Helpers of all tokenizers, and what the interface promises."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.tokenizers import ByteTokenizer, Tokenizer, token_dtype, train_tokenizer
from data_pipeline.tokenizers.ids import IdTokenizer
from data_pipeline.tokenizers.pretrained import from_library_json
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
