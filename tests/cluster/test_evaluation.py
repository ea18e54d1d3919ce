"""Evaluation with Ray actors: the score of one process."""

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.connection import ray_connection
from cluster.evaluation import score_on_ray
from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.shard_reader import open_split
from txl_dist.evaluation.evaluate import (
    EvaluationJob,
    EvaluationSettings,
    evaluate_in_process,
    plan_evaluation,
    summarise,
)


@pytest.mark.fault_row(49)
@pytest.mark.slow
def test_the_score_is_the_same_for_any_number_of_workers_and_any_batch(
    dataset: Path, trained: Path
) -> None:
    settings = EvaluationSettings(
        split="valid",
        mode="exact",
        tgt_len=6,
        mem_len=8,
        clamp_len=None,
        same_length=False,
        reset="document",
    )
    job = EvaluationJob(
        checkpoint=trained / "checkpoints" / "step-00000020",
        data=dataset,
        settings=settings,
        batch_chunks=3,
    )
    expected = evaluate_in_process(job, on_progress=lambda done, total: None)
    assert expected.sums.num_tokens == load_manifest(dataset).splits["valid"].tokens - 1
    chunks = plan_evaluation(open_split(dataset, "valid"), settings, n_layer=2)
    assert len(chunks) > 12  # so that each of three workers has something to do
    with ray_connection(None, num_cpus=3):
        for num_workers, batch_chunks in ((1, 5), (2, 1), (3, 4)):
            scores = score_on_ray(
                replace(job, batch_chunks=batch_chunks),
                chunks,
                num_workers=num_workers,
                num_threads=1,
                on_progress=lambda done, total: None,
            )
            result = summarise(scores, chunks, settings)
            assert result.sums.num_tokens == expected.sums.num_tokens
            assert result.sums.nats == pytest.approx(expected.sums.nats, rel=1e-6)
