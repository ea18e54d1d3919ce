"""The loss by position, by token frequency and by document: sums that add up to the score.

The oracle counts target by target, from documents that are known.

`txl eval --details` on workers: the same tables for any workers, and resumed like the score.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.streams.segments import read_range
from data_pipeline.system.workers import InProcess, ProcessWorkers, Workers
from tests.properties.test_exact_evaluation import cases, sequential_nats
from tests.support.exported_model import export_small_model
from tests.support.hypothesis_examples import examples
from tests.support.small_models import VOCAB_SIZE
from tests.support.split_case import BYTE_COUNTS_V, SplitCase, small_chunks
from txl_dist.evaluation import breakdown
from txl_dist.evaluation.breakdown import (
    DOCUMENT,
    MIN_DOCUMENTS,
    TABLES,
    Breakdown,
    BreakdownCounter,
    LossTable,
    breakdown_from_json,
    breakdown_to_json,
    count_tokens,
    counted_split,
    log_bucket,
    log_bucket_bounds,
    paired_difference,
    score_intervals,
    total_breakdown,
)
from txl_dist.evaluation.distributed import PlannedEvaluation, evaluate_on_workers, plan_spec
from txl_dist.evaluation.scores import LossSums
from txl_dist.evaluation.spec import EvaluationSpec, evaluation_spec

FREQUENCY_BUCKET_V = np.arange(VOCAB_SIZE, dtype=np.uint8) % 3


def break_down(case: SplitCase) -> tuple[LossSums, Breakdown]:
    """The sums and the breakdown of a split, batch by batch."""
    chunks, sums, parts = case.plan(), LossSums(), []
    with small_chunks(case):
        for first in range(0, len(chunks), case.batch_chunks):
            counter = BreakdownCounter(
                frequency_bucket_V=FREQUENCY_BUCKET_V, byte_counts_V=BYTE_COUNTS_V
            )
            batch = chunks[first : first + case.batch_chunks]
            sums = sum(case.scorer.scores(batch, counter=counter), sums)
            parts.append(counter.breakdown())
    return sums, total_breakdown(parts)


@examples(20)
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
    sums, breakdown = break_down(case)
    assert set(breakdown) == {DOCUMENT, *TABLES}
    for table in breakdown.values():
        assert table.bytes_K.sum() == sums.num_bytes
        assert (np.diff(table.key_K) > 0).all()
    assert sums == sum(case.scorer.scores(case.plan()), LossSums()), "a counter changes nothing"
    actual = {
        (name, key): (nats, tokens)
        for name, table in breakdown.items()
        for key, nats, tokens, _ in table.rows()
    }
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


def test_many_documents_are_added_in_linear_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_segments, tgt_len, total, num_rows = 400, 6, LossTable.total, 0

    def counting_total(parts: Sequence[LossTable]) -> LossTable:
        nonlocal num_rows
        num_rows += sum(len(part.key_K) for part in parts)
        return total(parts)

    monkeypatch.setattr(LossTable, "total", counting_total)
    counter = BreakdownCounter(frequency_bucket_V=None, byte_counts_V=torch.ones(1))
    nats_N = torch.rand(num_segments * tgt_len)
    position_N = torch.arange(len(nats_N))
    age_N = position_N % 4  # so every other segment ends in a document that the next one continues
    columns = nats_N, torch.zeros_like(position_N), position_N, age_N
    for segment in zip(*(column.split(tgt_len) for column in columns), strict=True):
        counter.add(*(column_T[None] for column_T in segment))

    expected = np.zeros(len(nats_N) // 4)
    np.add.at(expected, position_N.numpy() // 4, nats_N.double().numpy())
    assert counter.breakdown()[DOCUMENT].nats_K.tolist() == expected.tolist()
    assert num_rows < 10 * len(nats_N)


def test_json_keeps_every_bit() -> None:
    _, breakdown = break_down(CASE)
    content = json.loads(json.dumps(breakdown_to_json(breakdown)))
    assert breakdown_to_json(breakdown_from_json(content)) == breakdown_to_json(breakdown)


def test_the_buckets_of_counts_are_powers_of_two_without_a_gap() -> None:
    buckets = Counter(log_bucket(np.arange(17)).tolist())
    assert [(*log_bucket_bounds(bucket), size) for bucket, size in sorted(buckets.items())] == [
        (0, 0, 1), (1, 1, 1), (2, 3, 2), (4, 7, 4), (8, 15, 8), (16, 31, 1),
    ]  # fmt: skip
    large = np.array([2**40 - 1, 2**40])
    assert [log_bucket_bounds(bucket) for bucket in log_bucket(large).tolist()] == [
        (2**39, 2**40 - 1),
        (2**40, 2**41 - 1),
    ]


@pytest.fixture(scope="module")
def spec(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> EvaluationSpec:
    model = export_small_model(tmp_path_factory.mktemp("model") / "small", dataset)
    return evaluation_spec(model, dataset, split="train", tgt_len=12, batch=1, max_tokens=240)


def evaluate(spec: EvaluationSpec, workers: Workers) -> PlannedEvaluation:
    """The scored spec, with its details."""
    planned = plan_spec(spec, details=True)
    evaluate_on_workers([planned], workers)
    return planned


@pytest.fixture(scope="module")
def expected(spec: EvaluationSpec) -> PlannedEvaluation:
    return evaluate(spec, InProcess())


def details(planned: PlannedEvaluation) -> dict[str, Any]:
    content: dict[str, Any] = planned.result().to_json()["details"]
    return content


def breakdown_of(planned: PlannedEvaluation) -> Breakdown:
    assert planned.breakdown is not None
    return planned.breakdown


def test_details_do_not_change_the_score(spec: EvaluationSpec, expected: PlannedEvaluation) -> None:
    (plain,) = evaluate_on_workers([plan_spec(spec)], InProcess())
    assert plain == expected.result().model_copy(update={"details": None})
    paths = {plan_spec(spec, Path("scores"), details=d).finished.path for d in (False, True)}
    assert len(paths) == 2


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 3])
def test_the_details_are_the_same_on_any_number_of_workers(
    spec: EvaluationSpec, expected: PlannedEvaluation, num_workers: int
) -> None:
    with ProcessWorkers(num_workers) as workers:
        for batch in (1, 3):
            result = evaluate(replace(spec, batch_chunks=batch), workers)
            tables = breakdown_of(result)
            for name, table in breakdown_of(expected).items():
                assert (tables[name].tokens_K == table.tokens_K).all()
                np.testing.assert_allclose(tables[name].nats_K, table.nats_K, rtol=1e-6)
            if batch == spec.batch_chunks:
                assert details(result) == details(expected), "bit for bit"


def test_every_token_of_the_split_is_counted_once(
    spec: EvaluationSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breakdown, "COUNTED_TOKENS", 300)
    manifest = load_manifest(spec.data)
    source = open_split(spec.data, "valid")
    tokens, _ = read_range(source, 0, source.num_tokens)
    calls: list[tuple[str, int, int]] = []
    count_V = count_tokens(
        open_split(spec.data, "valid"), progress=lambda *call: calls.append(call)
    )
    assert (count_V == np.bincount(tokens, minlength=manifest.vocab_size)).all()
    assert calls[-1] == ("counting tokens", source.num_tokens, source.num_tokens)
    assert counted_split(manifest, "valid") == "train"
    only_valid = manifest.model_copy(update={"splits": {"valid": manifest.splits["valid"]}})
    assert counted_split(only_valid, "valid") == "valid"


def test_the_json_names_the_bounds_of_every_bucket(expected: PlannedEvaluation) -> None:
    content = details(expected)
    tgt_len = expected.spec.settings.tgt_len
    assert [row["from"] for row in content["by_segment_position"]] == list(range(tgt_len))
    for table in ("by_document_position", "by_segment_position", "by_token_frequency"):
        rows = content[table]
        assert sum(row["tokens"] for row in rows) == expected.sums.num_tokens
        assert all(row["from"] <= row["to"] for row in rows)
        assert all(low["to"] < high["from"] for low, high in pairwise(rows))
    assert content["num_documents"] == len(breakdown_of(expected)[DOCUMENT].key_K)


# --- the interval of a score, by resampling documents ---------------------------------------------


def documents(num_documents: int, *, seed: int = 0) -> LossTable:
    """Documents of 1 to 50 tokens, whose mean losses differ."""
    random = np.random.default_rng(seed)
    tokens_D = random.integers(1, 51, num_documents)
    return LossTable(
        key_K=np.cumsum(tokens_D),
        nats_K=tokens_D * random.normal(3.0, 0.5, num_documents),
        tokens_K=tokens_D,
        bytes_K=4 * tokens_D,
    )


def interval_of(sums: LossTable) -> tuple[float, float]:
    """That of the nats per token."""
    intervals = score_intervals(sums)
    assert intervals is not None
    ends = intervals["nats_per_token"]
    assert ends is not None
    return ends


@pytest.mark.parametrize("seed", range(2))
def test_the_interval_contains_the_score_and_shrinks_with_more_documents(seed: int) -> None:
    widths = []
    for num_documents in (10, 160, 2560):
        sums = documents(num_documents, seed=seed)
        low, high = interval_of(sums)
        assert low < sums.nats_K.sum() / sums.tokens_K.sum() < high
        widths.append(high - low)
    residual_D = sums.nats_K - sums.nats_K.sum() / sums.tokens_K.sum() * sums.tokens_K
    standard_error = math.sqrt((residual_D**2).sum()) / sums.tokens_K.sum()
    assert widths[-1] == pytest.approx(2 * 1.96 * standard_error, rel=0.15)
    # 16 times the documents: a quarter of the width.
    assert widths[0] / widths[1] == pytest.approx(4, rel=0.6)
    assert widths[1] / widths[2] == pytest.approx(4, rel=0.3)


@pytest.mark.slow
def test_the_interval_covers_the_true_mean_as_often_as_it_says() -> None:
    intervals = [interval_of(documents(60, seed=seed)) for seed in range(40)]
    covered = [low <= 3.0 <= high for low, high in intervals]
    assert 34 <= sum(covered) <= 40  # 38 expected


def test_the_interval_is_the_same_every_time_and_that_of_a_function_is_its_function() -> None:
    intervals = score_intervals(documents(20))
    assert intervals == score_intervals(documents(20))
    assert intervals is not None
    low, high = interval_of(documents(20))
    assert intervals["perplexity"] == (math.exp(low), math.exp(high))
    assert intervals["bits_per_token"] == (low / math.log(2), high / math.log(2))
    assert intervals["bits_per_byte"] == (
        pytest.approx(low / 4 / math.log(2)),
        pytest.approx(high / 4 / math.log(2)),
    )


def test_documents_of_equal_loss_have_an_interval_without_width_and_few_have_none() -> None:
    equal = LossTable(
        np.arange(12), np.arange(1.0, 13.0), np.arange(1, 13), np.zeros(12, dtype=np.int64)
    )
    intervals = score_intervals(equal)
    assert intervals is not None
    assert intervals["nats_per_token"] == (1.0, 1.0)
    assert intervals["bits_per_byte"] is None
    few = documents(MIN_DOCUMENTS - 1)
    assert score_intervals(few) is None
    assert score_intervals(documents(MIN_DOCUMENTS)) is not None
    assert paired_difference(few, few) == (0.0, None)


def test_a_paired_difference_leaves_out_how_hard_the_documents_are() -> None:
    base = documents(40)
    noise = np.random.default_rng(1).normal(0.02, 0.01, 40)
    better = replace(base, nats_K=base.nats_K - noise * base.tokens_K)
    difference, ends = paired_difference(better, base)
    assert difference == pytest.approx(-(noise * base.tokens_K).sum() / base.tokens_K.sum())
    assert ends is not None
    assert ends[0] < difference < ends[1] < 0, "although the documents differ by 0.5"
    (low, high), (other_low, other_high) = interval_of(better), interval_of(base)
    assert max(low, other_low) < min(high, other_high), "the intervals of the scores overlap"
    back, turned = paired_difference(base, better)
    assert (back, turned) == (-difference, (pytest.approx(-ends[1]), pytest.approx(-ends[0])))
