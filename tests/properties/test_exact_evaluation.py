"""Promise 5, exact evaluation: chunks scored on any worker add up to one sequential pass.

The oracle is that pass: one lane, segment after segment from the split's start, ages by their
definition. Only the model is the same code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.streams import cursor
from data_pipeline.streams.segments import Reset
from tests.support.hypothesis_examples import examples
from tests.support.small_models import VOCAB_SIZE, small_model
from tests.support.token_sources import TextSource, random_corpus
from txl_dist.errors import DataError
from txl_dist.evaluation import chunks as evaluation_chunks
from txl_dist.evaluation.chunks import EvaluationChunk
from txl_dist.evaluation.evaluate import EvaluationSettings, plan_evaluation, summarise
from txl_dist.evaluation.loss_sums import LossSums
from txl_dist.evaluation.scoring import Scorer
from txl_dist.model.transformer_xl import TransformerXL

BYTE_COUNTS_V = torch.arange(VOCAB_SIZE) % 4
"""UTF-8 bytes per token id; token 0 has none."""


@dataclass(frozen=True)
class Case:
    """A split, a model, and how chunks of it are cut and batched."""

    lengths: list[list[int]]
    tgt_len: int
    model_options: dict[str, Any]
    reset: Reset
    batch_chunks: int = 2
    target_num_chunks: int = 100
    min_overhead: int = 0
    max_tokens: int | None = None

    @property
    def source(self) -> TextSource:
        return random_corpus(self.lengths, vocab_size=VOCAB_SIZE, seed=2)

    @property
    def model(self) -> TransformerXL:
        return small_model(seed=4, **self.model_options)

    @property
    def settings(self) -> EvaluationSettings:
        config = self.model.config
        return EvaluationSettings(
            split="valid",
            mode="exact",
            tgt_len=self.tgt_len,
            mem_len=config.mem_len,
            clamp_len=config.clamp_len,
            same_length=config.same_length,
            reset=self.reset,
            max_tokens=self.max_tokens,
        )

    @property
    def scorer(self) -> Scorer:
        return Scorer(
            model=self.model,
            source=self.source,
            tgt_len=self.tgt_len,
            reset=self.reset,
            batch_chunks=self.batch_chunks,
            byte_counts_V=BYTE_COUNTS_V,
        )

    def plan(self) -> list[EvaluationChunk]:
        """Chunks of this tiny split, which the package would otherwise cut into one or two."""
        with small_chunks(self):
            return plan_evaluation(self.source, self.settings, n_layer=self.model.config.n_layer)


@contextmanager
def small_chunks(case: Case) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation_chunks, "TARGET_NUM_CHUNKS", case.target_num_chunks)
        patch.setattr(evaluation_chunks, "MIN_CONTEXTS_PER_CHUNK", case.min_overhead)
        patch.setattr(cursor, "CHUNK_TOKENS", 5)
        yield


def sequential_nats(case: Case) -> list[float]:
    """Nats of every target of the split, from one pass."""
    tokens = [token for document in case.source.documents for token in document]
    ages = list(range(len(tokens)))
    if case.reset == "document":
        ages = [age for document in case.source.documents for age in range(len(document))]
    model, nats = case.model, []
    memory = model.empty_memory(1)
    for start in range(0, len(tokens) - 1, case.tgt_len):
        stop = min(start + case.tgt_len, len(tokens) - 1)
        columns = (tokens[start:stop], tokens[start + 1 : stop + 1], ages[start:stop])
        with torch.no_grad():
            nats_BT, memory = model(*(torch.tensor([column]) for column in columns), memory)
        nats += nats_BT[0].tolist()
    return nats


document_lengths = st.lists(
    st.lists(st.one_of(st.integers(1, 4), st.integers(10, 30)), min_size=1, max_size=4),
    min_size=1,
    max_size=3,
).filter(lambda lengths: sum(map(sum, lengths)) >= 2)


cases = st.builds(
    Case,
    lengths=document_lengths,
    tgt_len=st.integers(1, 5),
    model_options=st.fixed_dictionaries(
        {
            "n_layer": st.integers(1, 3),
            "mem_len": st.integers(1, 8),
            "clamp_len": st.sampled_from([None, 3]),
            "same_length": st.booleans(),
        }
    )
    | st.just({"mem_len": 0}),
    reset=st.sampled_from(["document", "stream"]),
    batch_chunks=st.integers(1, 5),
    target_num_chunks=st.integers(1, 50),
    min_overhead=st.integers(0, 2),
    max_tokens=st.none() | st.integers(2, 40),
)


@examples(120)
@given(case=cases)
def test_the_chunks_add_up_to_one_sequential_pass(case: Case) -> None:
    chunks = case.plan()
    with small_chunks(case):
        result = summarise(case.scorer.scores(chunks), chunks, case.settings)

    tokens = [token for document in case.source.documents for token in document]
    num_tokens = min(len(tokens), case.max_tokens or len(tokens))
    expected = sequential_nats(case)[: num_tokens - 1]
    assert result.sums.num_tokens == num_tokens - 1, "every target once"
    assert result.sums.num_bytes == int(BYTE_COUNTS_V[tokens[1:num_tokens]].sum())
    assert result.sums.nats == pytest.approx(sum(expected), rel=1e-10)


@examples(60)
@given(case=cases)
def test_every_chunk_scores_as_in_the_sequential_pass(case: Case) -> None:
    chunks, nats = case.plan(), sequential_nats(case)
    for chunk, sums in zip(chunks, case.scorer.scores(chunks), strict=True):
        assert sums.num_tokens == chunk.stop - chunk.start
        assert sums.nats == pytest.approx(sum(nats[chunk.start : chunk.stop]), rel=1e-10)


LONG_DOCUMENT = Case([[60]], tgt_len=3, model_options={"n_layer": 2, "mem_len": 6}, reset="stream")


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7, 30])
@pytest.mark.parametrize("reset", ["document", "stream"])
def test_any_number_of_workers_gives_the_same_sums(num_workers: int, reset: Reset) -> None:
    case = replace(LONG_DOCUMENT, lengths=[[20, 3], [40]], reset=reset, batch_chunks=1)
    chunks = case.plan()
    scores = [LossSums()] * len(chunks)
    for worker in range(num_workers):
        indices = range(worker, len(chunks), num_workers)
        sums = case.scorer.scores([chunks[i] for i in indices])
        for index, chunk_sums in zip(indices, sums, strict=True):
            scores[index] = chunk_sums
    assert len(chunks) == 21
    assert scores == list(case.scorer.scores(chunks)), "to the last bit"


@pytest.mark.parametrize("batch_chunks", [2, 5, 100])
def test_any_batch_size_gives_the_same_sums(batch_chunks: int) -> None:
    one, many = (replace(LONG_DOCUMENT, batch_chunks=size) for size in (1, batch_chunks))
    chunks = one.plan()
    for alone, batched in zip(one.scorer.scores(chunks), many.scorer.scores(chunks), strict=True):
        assert batched.nats == pytest.approx(alone.nats, rel=1e-12)
        assert (batched.num_tokens, batched.num_bytes) == (alone.num_tokens, alone.num_bytes)


@pytest.mark.parametrize("reset", ["document", "stream"])
@pytest.mark.parametrize("n_layer", [1, 2, 3])
def test_one_segment_less_of_context_is_not_enough(n_layer: int, reset: Reset) -> None:
    """The context is not longer than necessary, and the tests above can fail."""
    options = {"n_layer": n_layer, "mem_len": 6}
    case = replace(LONG_DOCUMENT, model_options=options, reset=reset)
    chunks = case.plan()
    whole = [chunk for chunk in chunks if chunk.start - chunk.context_start == n_layer * 6]
    assert len(whole) > 5
    shorter = [replace(chunk, context_start=chunk.context_start + case.tgt_len) for chunk in whole]
    nats = sequential_nats(case)
    for chunk, sums in zip(shorter, case.scorer.scores(shorter), strict=True):
        assert abs(sums.nats - sum(nats[chunk.start : chunk.stop])) > 1e-6


def test_a_context_with_other_segment_boundaries_is_not_exact() -> None:
    """The same number of tokens: what a token sees depends on where its segment begins."""
    case, nats = LONG_DOCUMENT, sequential_nats(LONG_DOCUMENT)
    shifted = [
        EvaluationChunk(chunk.context_start + 1, chunk.start + 1, chunk.stop + 1)
        for chunk in case.plan()
        if chunk.context_start > 0 and chunk.stop < len(nats)
    ]
    for chunk, sums in zip(shifted, case.scorer.scores(shifted), strict=True):
        assert abs(sums.nats - sum(nats[chunk.start : chunk.stop])) > 1e-6


@pytest.mark.parametrize("lengths", [[[1]], [[5, 3], [7]]], ids=["one token", "max_tokens=1"])
def test_a_split_without_a_target_is_rejected_with_a_next_step(lengths: list[list[int]]) -> None:
    with pytest.raises(DataError, match="txl prepare"):
        replace(LONG_DOCUMENT, lengths=lengths, max_tokens=1).plan()
