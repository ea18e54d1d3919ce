"""`txl eval --details` on workers: the same tables for any workers, and resumed like the score."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.streams.cursor import read_range
from data_pipeline.system.workers import InProcess, ProcessWorkers, Workers
from tests.support.exported_model import export_small_model
from txl_dist.evaluation import token_counts
from txl_dist.evaluation.details import ScoreDetails
from txl_dist.evaluation.distributed import evaluate_on_workers, plan_job
from txl_dist.evaluation.evaluate import EvaluationResult
from txl_dist.evaluation.job import EvaluationJob, evaluation_job
from txl_dist.evaluation.token_counts import count_tokens, counted_split

from .test_distributed import Recorder


@pytest.fixture(scope="module")
def job(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> EvaluationJob:
    model = export_small_model(tmp_path_factory.mktemp("model") / "small", dataset)
    return evaluation_job(model, dataset, split="train", tgt_len=12, batch=1, max_tokens=240)


def evaluate(
    job: EvaluationJob, workers: Workers, scores: Path | None = None, *, resume: bool = False
) -> EvaluationResult:
    planned = plan_job(job, scores, resume=resume, details=True)
    return evaluate_on_workers([planned], workers)[0]


@pytest.fixture(scope="module")
def expected(job: EvaluationJob) -> EvaluationResult:
    return evaluate(job, InProcess())


def details(result: EvaluationResult) -> ScoreDetails:
    assert result.details is not None
    return result.details


def test_details_do_not_change_the_score(job: EvaluationJob, expected: EvaluationResult) -> None:
    (plain,) = evaluate_on_workers([plan_job(job)], InProcess())
    assert plain.details is None
    assert plain == expected
    assert (
        plan_job(job, Path("scores")).finished.path
        != plan_job(job, Path("scores"), details=True).finished.path
    )


def test_the_order_of_the_batches_does_not_change_a_bit(
    job: EvaluationJob, expected: EvaluationResult
) -> None:
    result = evaluate(job, Recorder())
    assert details(result).to_json() == details(expected).to_json()


def test_a_stopped_evaluation_goes_on_from_its_finished_batches(
    job: EvaluationJob, expected: EvaluationResult, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        evaluate(job, Recorder(stop_after=4), tmp_path)  # the first unit counts tokens
    workers = Recorder()
    result = evaluate(job, workers, tmp_path, resume=True)
    assert details(result).to_json() == details(expected).to_json()
    chunks = [unit for unit in workers.scored if unit.startswith("chunks")]
    assert len(chunks) == expected.num_chunks - 3
    again = Recorder()
    result = evaluate(job, again, tmp_path, resume=True)
    assert again.scored == [], "not even the tokens are counted again"
    assert details(result).to_json() == details(expected).to_json()


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 3])
def test_the_details_are_the_same_on_any_number_of_workers(
    job: EvaluationJob, expected: EvaluationResult, num_workers: int
) -> None:
    with ProcessWorkers(num_workers) as workers:
        for batch in (1, 3):
            result = evaluate(replace(job, batch_chunks=batch), workers)
            tables = details(result).breakdown.tables
            for name, table in details(expected).breakdown.tables.items():
                assert (tables[name].tokens_K == table.tokens_K).all()
                np.testing.assert_allclose(tables[name].nats_K, table.nats_K, rtol=1e-6)
            if batch == job.batch_chunks:
                assert details(result).to_json() == details(expected).to_json(), "bit for bit"


def test_every_token_of_the_split_is_counted_once(
    job: EvaluationJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_counts, "TASK_TOKENS", 700)
    monkeypatch.setattr(token_counts, "READ_TOKENS", 300)
    manifest = load_manifest(job.data)
    source = open_split(job.data, "valid")
    tokens, _ = read_range(source, 0, source.num_tokens)
    calls: list[tuple[str, int, int]] = []
    count_V = count_tokens(job.data, "valid", Recorder(), progress=lambda *call: calls.append(call))
    assert (count_V == np.bincount(tokens, minlength=manifest.vocab_size)).all()
    assert calls[-1] == ("counting tokens", source.num_tokens, source.num_tokens)


def test_frequencies_are_those_of_train_or_else_of_the_scored_split(job: EvaluationJob) -> None:
    manifest = load_manifest(job.data)
    assert counted_split(manifest, "valid") == "train"
    only_valid = manifest.model_copy(update={"splits": {"valid": manifest.splits["valid"]}})
    assert counted_split(only_valid, "valid") == "valid"


def test_the_json_names_the_bounds_of_every_bucket(expected: EvaluationResult) -> None:
    content = details(expected).to_json()
    tgt_len = expected.settings.tgt_len
    assert [row["from"] for row in content["by_segment_position"]] == list(range(tgt_len))
    for table in ("by_document_position", "by_segment_position", "by_token_frequency"):
        rows = content[table]
        assert sum(row["tokens"] for row in rows) == expected.sums.num_tokens
        assert all(row["from"] <= row["to"] for row in rows)
        assert all(low["to"] < high["from"] for low, high in pairwise(rows))
    assert content["num_documents"] == len(details(expected).documents.start_D)
