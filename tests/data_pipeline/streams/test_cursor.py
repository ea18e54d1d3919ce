"""The cursor: which blocks a seek reads, in what chunks, the ages, and the unigram entropy."""

import itertools
from collections import Counter
from itertools import pairwise
from math import log
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from data_pipeline.streams import cursor
from data_pipeline.streams.cursor import LaneCursor, _permute, read_range, unigram_entropy
from data_pipeline.streams.order import ORDERINGS
from data_pipeline.streams.segments import SegmentReader
from tests.data_pipeline.streams.numbered_stream import plan_of, stream_of
from tests.support.hypothesis_examples import examples
from tests.support.token_sources import NumberedSource, TextSource, random_corpus


def test_a_range_of_the_split_keeps_ages_from_before_its_start() -> None:
    source = NumberedSource([3, 2], [5, 3])
    tokens, document_age = read_range(source, 1, 9)
    assert tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert document_age.tolist() == [1, 2, 0, 1, 0, 1, 2, 3]
    with pytest.raises(ValueError, match="not a range of 13 tokens"):
        read_range(source, 1, 14)


@pytest.mark.parametrize("shuffle", ["blocks", "none"])
def test_a_seek_reads_at_most_two_blocks_per_lane(shuffle: Any) -> None:
    source = NumberedSource(*[[60, 40]] * 500)
    plan = plan_of(source, num_lanes=3, tgt_len=8)
    reader = SegmentReader(
        source,
        plan,
        lanes=range(3),
        num_rows=3,
        reset="document",
        ordering=ORDERINGS[shuffle],
        seed=1,
    )
    for position in (0, 16_000, 90_000_003, 5):
        source.reads.clear()
        reader.read(position, 1)
        assert len(source.reads) <= 2 * plan.num_lanes, "a block, or two where a segment meets both"


def test_a_giant_document_is_read_in_bounded_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor, "CHUNK_TOKENS", 100)
    source = NumberedSource([10_000])
    with stream_of(source, num_lanes=1, tgt_len=32, position=5_040) as stream:
        read = np.concatenate([s.input[0] for s in itertools.islice(stream, 100)])
    assert_array_equal(read, np.arange(5_040, 5_040 + 3_200))
    assert source.reads[0] == (0, 5_040, 5_100)
    assert max(stop - start for _, start, stop in source.reads) == 100
    assert len(source.reads) == len(set(source.reads)), "nothing is read twice"


def test_reading_forwards_reads_every_block_once() -> None:
    source = NumberedSource(*[[60, 40]] * 50)
    with stream_of(source, num_lanes=1, tgt_len=8) as stream:
        list(itertools.islice(stream, 5000 // 8 - 10))
    blocks = [block for block, _, _ in source.reads]
    assert len(blocks) == len(set(blocks))


@given(lengths=st.lists(st.integers(1, 900), min_size=2, max_size=30), data=st.data())
def test_short_and_long_documents_are_permuted_as_wholes(lengths: list[int], data: Any) -> None:
    stored = np.arange(sum(lengths), dtype=np.uint16)
    starts = np.cumsum([0, *lengths[:-1]])
    documents = np.array(data.draw(st.permutations(range(len(lengths)))))
    tokens, age = _permute(stored, starts, documents)
    expected = [stored[starts[d] : starts[d] + lengths[d]] for d in documents]
    assert_array_equal(tokens, np.concatenate(expected))
    assert_array_equal(age, np.concatenate([np.arange(len(part)) for part in expected]))
    assert (tokens.dtype, age.dtype) == (np.uint16, np.int32)


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
    monkeypatch.setattr(cursor, "SAMPLE_TOKENS", 3200)
    assert unigram_entropy([source], [1.0], vocab_size=5) == pytest.approx(whole, rel=0.01)
    assert [stop - start for start, stop in reads] == [100] * 32
    assert (reads[0][0], reads[-1][1]) == (0, 20_000)
    assert max(b[0] - a[0] for a, b in pairwise(reads)) < 700
