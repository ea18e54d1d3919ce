"""The loss by position, by token frequency and by document: sums that add up to the score.

The oracle counts target by target, from documents that are known.
"""

import json
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.test_exact_evaluation import cases, sequential_nats
from tests.support.hypothesis_examples import examples
from tests.support.small_models import VOCAB_SIZE
from tests.support.split_case import BYTE_COUNTS_V, SplitCase, small_chunks
from txl_dist.evaluation.breakdown import (
    TABLES,
    BreakdownCounter,
    LossBreakdown,
    log_bucket,
    log_bucket_bounds,
)
from txl_dist.evaluation.loss_sums import LossSums

FREQUENCY_BUCKET_V = np.arange(VOCAB_SIZE, dtype=np.uint8) % 3


def break_down(case: SplitCase) -> tuple[LossSums, LossBreakdown]:
    """The sums and the breakdown of a split, batch by batch."""
    chunks, sums, parts = case.plan(), LossSums(), []
    with small_chunks(case):
        for first in range(0, len(chunks), case.batch_chunks):
            counter = BreakdownCounter(
                tgt_len=case.tgt_len,
                frequency_bucket_V=FREQUENCY_BUCKET_V,
                byte_counts_V=BYTE_COUNTS_V,
            )
            batch = chunks[first : first + case.batch_chunks]
            sums = sum(case.scorer.scores(batch, counter=counter), sums)
            parts.append(counter.breakdown())
    return sums, LossBreakdown.total(parts)


@examples(15)
@given(case=cases)
def test_every_table_and_the_documents_add_up_to_the_score(case: SplitCase) -> None:
    sums, breakdown = break_down(case)
    documents = breakdown.documents
    for table in breakdown.tables.values():
        assert table.nats_K.sum() == pytest.approx(sums.nats, rel=1e-9)
        assert table.tokens_K.sum() == sums.num_tokens
    assert documents.nats_D.sum() == pytest.approx(sums.nats, rel=1e-9)
    assert documents.tokens_D.sum() == sums.num_tokens
    assert documents.bytes_D.sum() == sums.num_bytes
    assert (np.diff(documents.start_D) > 0).all()


@examples(10)
@given(case=cases)
def test_every_target_is_in_its_bucket(case: SplitCase) -> None:
    expected: dict[tuple[str, int], list[float]] = defaultdict(list)
    nats = sequential_nats(case)
    targets = [
        (token, age, start)
        for document, start in with_starts(case.source.documents)
        for age, token in enumerate(document)
    ]
    num_targets = min(len(nats), (case.max_tokens or len(targets)) - 1)
    for query in range(num_targets):
        token, age, start = targets[query + 1]
        expected["document_position", age.bit_length()].append(nats[query])
        expected["segment_position", query % case.tgt_len].append(nats[query])
        expected["token_frequency", int(FREQUENCY_BUCKET_V[token])].append(nats[query])
        expected["document", start].append(nats[query])
    _, breakdown = break_down(case)
    documents = breakdown.documents
    actual = {
        (name, bucket): (nats, tokens)
        for name, table in breakdown.tables.items()
        for bucket, (nats, tokens) in enumerate(zip(table.nats_K, table.tokens_K, strict=True))
        if tokens
    }
    columns = documents.start_D.tolist(), documents.nats_D, documents.tokens_D
    actual |= {("document", start): (n, tokens) for start, n, tokens in zip(*columns, strict=True)}
    assert actual == {
        bucket: (pytest.approx(sum(losses), rel=1e-9), len(losses))
        for bucket, losses in expected.items()
    }


def with_starts(documents: list[list[int]]) -> list[tuple[list[int], int]]:
    starts = np.cumsum([0, *map(len, documents[:-1])]).tolist()
    return list(zip(documents, starts, strict=True))


CASE = SplitCase(
    [[20, 3], [1, 40]], tgt_len=3, model_options={"n_layer": 2, "mem_len": 6}, reset="document"
)


@pytest.mark.parametrize("batch_chunks", [1, 4, 100])
def test_the_batch_size_changes_no_count_and_only_the_last_digits(batch_chunks: int) -> None:
    _, one = break_down(replace(CASE, batch_chunks=3))
    _, other = break_down(replace(CASE, batch_chunks=batch_chunks))
    for name in TABLES:
        assert (other.tables[name].tokens_K == one.tables[name].tokens_K).all()
        np.testing.assert_allclose(
            other.tables[name].nats_K, one.tables[name].nats_K, rtol=1e-9, atol=1e-12
        )
    assert (other.documents.start_D == one.documents.start_D).all()
    assert (other.documents.tokens_D == one.documents.tokens_D).all()
    np.testing.assert_allclose(other.documents.nats_D, one.documents.nats_D, rtol=1e-9)


def test_a_counter_does_not_change_the_sums() -> None:
    chunks = CASE.plan()
    assert break_down(CASE)[0] == sum(CASE.scorer.scores(chunks), LossSums())


def test_more_segments_than_are_kept_give_the_same_breakdown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, expected = break_down(CASE)
    monkeypatch.setattr("txl_dist.evaluation.breakdown.MAX_PARTS", 2)
    _, folded = break_down(CASE)
    assert folded.documents.tokens_D.tolist() == expected.documents.tokens_D.tolist()
    np.testing.assert_allclose(folded.documents.nats_D, expected.documents.nats_D, rtol=1e-12)


def test_json_keeps_every_bit() -> None:
    _, breakdown = break_down(CASE)
    content = json.loads(json.dumps(breakdown.to_json()))
    assert LossBreakdown.from_json(content).to_json() == breakdown.to_json()


@given(value=st.integers(0, 2**40))
def test_a_value_is_within_the_bounds_of_its_bucket(value: int) -> None:
    low, high = log_bucket_bounds(int(log_bucket(np.array([value]))[0]))
    assert low <= value <= high


def test_the_buckets_of_counts_have_no_gap() -> None:
    buckets = Counter(log_bucket(np.arange(17)).tolist())
    assert [(*log_bucket_bounds(bucket), size) for bucket, size in sorted(buckets.items())] == [
        (0, 0, 1),
        (1, 1, 1),
        (2, 3, 2),
        (4, 7, 4),
        (8, 15, 8),
        (16, 31, 1),
    ]
