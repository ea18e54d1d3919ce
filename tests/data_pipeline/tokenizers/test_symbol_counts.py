"""Counts of parts add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.tokenizers import tokenizer_of_counts, train_tokenizer
from data_pipeline.tokenizers.symbol_counts import (
    count_symbols,
    counts_from_bytes,
    counts_to_bytes,
    merge_counts,
)
from tests.data_pipeline.tokenizers.sample_tokenizers import CHAR, LM1B, WORD


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
