"""Chunks: every target is in one of them, the context is long enough, and costs a bounded share.

Memory of a worker: one model, and a bounded part of each chunk of one batch.
"""

import gc
import itertools
import tracemalloc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.streams import segments
from tests.support.hypothesis_examples import examples
from tests.support.small_models import small_model
from tests.support.token_sources import NumberedSource, TextSource
from txl_dist.evaluation import batches, scoring
from txl_dist.evaluation.scoring import (
    MIN_CONTEXTS_PER_CHUNK,
    EvaluationChunk,
    Scorer,
    evaluate_on_ranks,
    overhead,
    plan_chunks,
)
from txl_dist.evaluation.spec import EvaluationSettings, EvaluationSpec
from txl_dist.runtime.world import World

shapes = st.fixed_dictionaries(
    {
        "num_targets": st.integers(1, 20_000),
        "tgt_len": st.integers(1, 70),
        "context_segments": st.integers(0, 20),
    }
).map(lambda shape: shape | {"context_tokens": shape["tgt_len"] * shape.pop("context_segments")})


@examples(200)
@given(shape=shapes, document_tokens=st.none() | st.integers(1, 3000))
def test_chunks_score_every_target_once_after_their_whole_context(
    shape: dict, document_tokens: int | None
) -> None:
    """The context begins at a segment boundary, no earlier than the segment in which the document
    starts, and costs a bounded share."""
    positions = [0]

    def document_start(position: int) -> int:
        positions.append(position)
        return position // document_tokens * document_tokens if document_tokens else 0

    chunks = plan_chunks(**shape, document_start=document_start if document_tokens else None)
    assert (chunks[0].start, chunks[-1].stop) == (0, shape["num_targets"])
    assert all(a.stop == b.start for a, b in itertools.pairwise(chunks))
    tgt_len = shape["tgt_len"]
    for chunk in chunks:
        assert chunk.start < chunk.stop
        assert chunk.start % tgt_len == chunk.context_start % tgt_len == 0
        first = document_start(chunk.start) // tgt_len * tgt_len
        expected = max(0, first, chunk.start - shape["context_tokens"])
        assert chunk.context_start == min(chunk.start, expected)
    assert max(positions) < shape["num_targets"]
    assert 0 <= overhead(chunks) <= 1 / MIN_CONTEXTS_PER_CHUNK


def test_without_a_limit_of_the_context_a_split_is_read_in_one_pass() -> None:
    (chunk,) = plan_chunks(num_targets=9999, tgt_len=4, context_tokens=None)
    assert chunk == EvaluationChunk(0, 0, 9999)
    with pytest.raises(ValueError, match="num_targets=0"):
        plan_chunks(num_targets=0, tgt_len=4, context_tokens=8)
    assert overhead([EvaluationChunk(0, 0, 30), EvaluationChunk(20, 30, 50)]) == 10 / 50


def test_reading_takes_no_more_memory_for_longer_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "READ_TOKENS", 1000)
    monkeypatch.setattr(segments, "CHUNK_TOKENS", 1000)
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

    def open_(_: EvaluationSpec) -> OpenedModel:
        gc.collect()
        assert not any(model() for model in alive), "two models at a time"
        model = OpenedModel()
        alive.append(weakref.ref(model))
        return model

    monkeypatch.setattr(EvaluationSpec, "open", open_)
    monkeypatch.setattr(batches, "_opened", {})
    settings = EvaluationSettings(
        split="valid", mode="exact", tgt_len=3, mem_len=3, clamp_len=None, same_length=False,
        reset="stream",
    )  # fmt: skip
    spec = EvaluationSpec(
        checkpoint=Path("model"), data=Path("data"), settings=settings, batch_chunks=1
    )
    for split in ("valid", "valid", "test", "valid"):
        batches.open_scorer(replace(spec, settings=replace(settings, split=split)))
    assert len(alive) == 3, "opened once for batches of one spec in a row"


def test_the_activity_of_a_rank_says_how_much_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """`txl status` shows it, so a long evaluation can be told from one that hangs."""
    world, names = World(0, 1), []
    world.activity.name = "evaluation of split valid"
    scorer = Scorer(
        model=small_model(vocab_size=11),
        source=TextSource([[[token % 11 for token in range(13)]]]),
        tgt_len=2,
        reset="stream",
        batch_chunks=2,
        byte_counts_V=torch.ones(11),
    )
    chunks = [EvaluationChunk(start, start, start + 4) for start in (0, 4, 8)]
    reader = Scorer.reader

    def noted(scorer: Scorer, *arguments: Any) -> Any:
        names.append(world.activity.name)
        return reader(scorer, *arguments)

    monkeypatch.setattr(Scorer, "reader", noted)
    assert evaluate_on_ranks(scorer, chunks, world=world) is not None
    name = "evaluation of split valid"
    assert names == [name, f"{name}, 67% scored"]
    assert world.activity.name == f"{name}, 100% scored"
