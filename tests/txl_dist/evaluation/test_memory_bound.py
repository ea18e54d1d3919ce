"""Memory of a worker: one model, and a bounded part of each chunk of one batch."""

import gc
import tracemalloc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_pipeline.streams import cursor
from tests.support.small_models import small_model
from tests.support.token_sources import NumberedSource
from txl_dist.evaluation import scoring
from txl_dist.evaluation.chunks import EvaluationChunk
from txl_dist.evaluation.job import EvaluationJob, EvaluationSettings
from txl_dist.evaluation.scoring import Scorer
from txl_dist.evaluation.worker import OpenJob


def test_reading_takes_no_more_memory_for_longer_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "READ_TOKENS", 1000)
    monkeypatch.setattr(cursor, "CHUNK_TOKENS", 1000)
    peaks = []
    for length in (4_000, 40_000):
        scorer = Scorer(
            model=small_model(),
            source=NumberedSource([4 * length + 1]),  # type: ignore[arg-type]
            tgt_len=10,
            reset="document",
            batch_chunks=4,
            byte_counts_V=torch.zeros(1),
        )
        chunks = [EvaluationChunk(n * length, n * length, (n + 1) * length) for n in range(4)]
        tracemalloc.start()
        assert sum(1 for _ in scorer.segments(chunks)) == length // 10
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0]  # chunks ten times as long


def test_a_worker_frees_its_model_before_it_loads_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    class OpenedModel:
        pass

    alive: list[weakref.ref[OpenedModel]] = []

    def open_(_: EvaluationJob) -> OpenedModel:
        gc.collect()
        assert not any(model() for model in alive), "two models at a time"
        model = OpenedModel()
        alive.append(weakref.ref(model))
        return model

    monkeypatch.setattr(EvaluationJob, "open", open_)
    settings = EvaluationSettings(
        split="valid",
        mode="exact",
        tgt_len=3,
        mem_len=3,
        clamp_len=None,
        same_length=False,
        reset="stream",
    )
    job = EvaluationJob(
        checkpoint=Path("model"), data=Path("data"), settings=settings, batch_chunks=1
    )
    open_job = OpenJob()
    for split in ("valid", "valid", "test", "valid"):
        open_job.scorer(replace(job, settings=replace(settings, split=split)))
    assert len(alive) == 3, "opened once for batches of one job in a row"
