"""The unigram entropy equals that of the counts of all tokens, or of a sample spread over them."""

from collections import Counter
from itertools import pairwise
from math import log
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.streams import unigram_entropy as module
from data_pipeline.streams.cursor import LaneCursor
from data_pipeline.streams.unigram_entropy import unigram_entropy
from tests.support.hypothesis_examples import examples
from tests.support.token_sources import TextSource, random_corpus

documents = st.lists(st.integers(0, 6), min_size=1, max_size=9)
corpora = st.lists(st.lists(documents, min_size=1, max_size=3), min_size=1, max_size=4)


@examples(100)
@given(first=corpora, second=corpora, share=st.floats(0.1, 0.9))
def test_it_is_the_entropy_of_the_frequencies_of_all_corpora_by_their_shares(
    first: list[list[list[int]]], second: list[list[list[int]]], share: float
) -> None:
    frequency: Counter[int] = Counter()
    sources = [TextSource(first), TextSource(second)]
    for source, weight in zip(sources, (share, 1 - share), strict=True):
        tokens = [token for document in source.documents for token in document]
        for token in tokens:
            frequency[token] += weight / len(tokens)  # type: ignore[assignment]
    expected = -sum(p * log(p) for p in frequency.values())
    assert unigram_entropy(sources, [share, 1 - share], vocab_size=7) == pytest.approx(expected)


def test_a_large_source_is_sampled_at_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    source, reads = random_corpus([[50]] * 400, vocab_size=5, seed=1), []
    read = LaneCursor.read

    def record(*arguments: Any) -> Any:
        reads.append(arguments[-2:])
        return read(*arguments)

    monkeypatch.setattr(LaneCursor, "read", record)
    whole = unigram_entropy([source], [1.0], vocab_size=5)
    assert reads == [(0, 20_000)]
    reads.clear()
    monkeypatch.setattr(module, "SAMPLE_TOKENS", 3200)
    assert unigram_entropy([source], [1.0], vocab_size=5) == pytest.approx(whole, rel=0.01)
    assert [stop - start for start, stop in reads] == [100] * 32
    assert (reads[0][0], reads[-1][1]) == (0, 20_000)
    assert max(b[0] - a[0] for a, b in pairwise(reads)) < 700
