"""Text and bytes of the tokens of today's tokenizers, against the library."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.tokenizers.pretrained import PretrainedTokenizer
from tests.support.hypothesis_examples import examples
from tests.support.tokenizer_families import (
    EUROPEAN,
    IN_BYTES,
    JAPANESE,
    LIBRARY_OF,
    tokenizer_of_family,
)
from txl_dist.generation.text import TextDecoder, TextLimits, stream_text

TEXTS = (EUROPEAN, JAPANESE, " two  spaces", "灰 Łódź €", "👩‍👩‍👧 e\u0301 ▁x", "<0x41> <tool_call>")
of_family = functools.cache(tokenizer_of_family)
ids_of = st.lists(st.integers(0, 2**20), max_size=12)


def streamed(tokenizer: PretrainedTokenizer, ids: list[int], cut: int = 0) -> list[str]:
    after = ids[cut - 1] if cut else None
    decoder = TextDecoder(tokenizer, after=after)
    return [*map(decoder.add, ids[cut:]), decoder.close()]


@pytest.mark.parametrize("family", LIBRARY_OF)
@examples(60)
@given(numbers=ids_of, cut=st.integers(0, 12))
def test_streamed_text_is_the_decoded_text_for_any_ids_and_any_prompt(
    family: str, numbers: list[int], cut: int
) -> None:
    tokenizer = of_family(family)
    ids = [number % tokenizer.vocab_size for number in numbers]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)
    cut = min(cut, len(ids))
    raw, prompt = tokenizer.decode_bytes(ids), tokenizer.decode_bytes(ids[:cut])
    assert raw.startswith(prompt)
    expected = raw.removeprefix(prompt).decode("utf-8", errors="replace")
    assert "".join(streamed(tokenizer, ids, cut)) == expected


@pytest.mark.parametrize("family", LIBRARY_OF)
@examples(60)
@given(numbers=ids_of)
def test_decoded_text_is_that_of_the_library(family: str, numbers: list[int]) -> None:
    tokenizer = of_family(family)
    library = tokenizer._library
    ids = [number % (tokenizer.vocab_size - 1) for number in numbers]
    ids = [id_ for id_ in ids if id_ != tokenizer.end_of_document]
    expected = library.decode(ids, skip_special_tokens=False)
    # In bytes that are not UTF-8 the library has other numbers of replacement characters.
    if "\ufffd" not in expected:
        assert tokenizer.decode(ids) == expected


@pytest.mark.parametrize("family", LIBRARY_OF)
@pytest.mark.parametrize("text", TEXTS)
def test_every_text_is_decoded_as_by_the_library_and_streamed_by_complete_characters(
    family: str, text: str
) -> None:
    tokenizer = of_family(family)
    ids = tokenizer.encode(text).tolist()
    library = tokenizer._library
    assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)
    decoder, growing = TextDecoder(tokenizer), ""
    for stop, id_ in enumerate(ids, start=1):
        growing += decoder.add(id_)
        # The only bytes that are not UTF-8 are those of the character that is not complete.
        assert growing == tokenizer.decode_bytes(ids[:stop]).decode("utf-8", errors="ignore")
    assert decoder.close() == ""


@pytest.mark.parametrize("family", IN_BYTES)
@pytest.mark.parametrize("stop", ["灰", "Ł", "€"])
def test_a_stop_string_of_several_tokens_ends_the_text(family: str, stop: str) -> None:
    tokenizer = of_family(family)
    ids = tokenizer.encode(f"the sea {stop} is far").tolist()
    assert len(tokenizer.encode(stop)) > 1
    assert "".join(stream_text(iter(ids), tokenizer, TextLimits(stop=(stop,)))) == "the sea "


@pytest.mark.parametrize("family", LIBRARY_OF)
@examples(60)
@given(text=st.text(max_size=20) | st.sampled_from(TEXTS))
def test_bytes_of_tokens_are_exact_or_not_known(family: str, text: str) -> None:
    tokenizer = of_family(family)
    assert tokenizer.lossless == (family in ("gpt2", "llama3"))
    ids = tokenizer.encode(text)
    expected = len(text.encode()) if tokenizer.lossless else 0
    assert tokenizer.token_bytes()[ids].sum() == expected
    if tokenizer.lossless:
        assert tokenizer.decode_bytes(ids) == text.encode()
