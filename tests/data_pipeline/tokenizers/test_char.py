"""Character vocabularies: round trips."""

from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.tokenizers import train_tokenizer
from tests.data_pipeline.tokenizers.sample_tokenizers import CHAR


@given(st.text())
def test_characters_of_the_training_text_come_back(text: str) -> None:
    tokenizer = train_tokenizer(CHAR, lambda: iter([text]))
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert tokenizer.end_of_document not in ids
