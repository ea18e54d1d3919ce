"""The byte tokenizer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.tokenizers import ByteTokenizer


@given(st.text())
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert tokenizer.end_of_document not in ids


def test_the_end_of_document_decodes_to_no_text() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([256, 72, 105, 256]) == "Hi"
    assert tokenizer.token_bytes()[256] == 0


def test_half_a_character_decodes_to_a_replacement_but_its_bytes_are_kept() -> None:
    ids = ByteTokenizer().encode("né")[:-1]
    assert ByteTokenizer().decode(ids) == "n�"
    assert ByteTokenizer().decode_bytes(ids) == b"n\xc3"


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="257"):
        ByteTokenizer().decode([65, 257])
