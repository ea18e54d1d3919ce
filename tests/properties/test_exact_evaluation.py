"""Promise 5, exact evaluation: chunks scored on any worker add up to one sequential pass.

The oracle is that pass: one lane, segment after segment from the split's start, ages by their
definition. Only the model is the same code.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.streams.segments import Reset
from tests.support.hypothesis_examples import examples
from tests.support.running_mean import KINDS
from tests.support.split_case import BYTE_COUNTS_V, SplitCase, small_chunks
from txl_dist.errors import DataError
from txl_dist.evaluation.scores import LossSums
from txl_dist.evaluation.scoring import EvaluationChunk


def sequential_nats(case: SplitCase) -> list[float]:
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
    SplitCase,
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
    | st.sampled_from(
        [
            {"mem_len": 0},
            {"mem_len": 5, "mem_shares": (0.0, 1.0)},
            {"mem_len": 6, "mem_shares": (0.5, 1.0), "same_length": True},
            *({"memory": kind} for kind in KINDS),
        ]
    ),
    reset=st.sampled_from(["document", "stream"]),
    batch_chunks=st.integers(1, 5),
    target_num_chunks=st.integers(1, 50),
    min_overhead=st.integers(0, 2),
    max_tokens=st.none() | st.integers(2, 40),
)


@examples(120)
@given(case=cases)
def test_the_chunks_have_the_scores_of_one_sequential_pass(case: SplitCase) -> None:
    chunks, nats = case.plan(), sequential_nats(case)
    with small_chunks(case):
        scores = list(case.scorer.scores(chunks))
    for chunk, sums in zip(chunks, scores, strict=True):
        assert sums.num_tokens == chunk.stop - chunk.start
        assert sums.nats == pytest.approx(sum(nats[chunk.start : chunk.stop]), rel=1e-10)

    tokens = [token for document in case.source.documents for token in document]
    num_tokens = min(len(tokens), case.max_tokens or len(tokens))
    total = sum(scores, LossSums())
    assert total.num_tokens == num_tokens - 1, "every target once"
    assert total.num_bytes == int(BYTE_COUNTS_V[tokens[1:num_tokens]].sum())
    assert total.nats == pytest.approx(sum(nats[: num_tokens - 1]), rel=1e-10)


OPTIONS = {"n_layer": 2, "mem_len": 6}
LONG_DOCUMENT = SplitCase([[60]], tgt_len=3, model_options=OPTIONS, reset="stream")


@pytest.mark.fault_row(39)
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


def test_a_split_without_a_target_is_rejected_with_a_next_step() -> None:
    with pytest.raises(DataError, match="txl prepare"):
        replace(LONG_DOCUMENT, lengths=[[1]]).plan()
    with pytest.raises(ValueError, match="max_tokens=1 must be a whole number of at least 2"):
        replace(LONG_DOCUMENT, max_tokens=1).plan()


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_read_from_their_start_if_the_memory_has_no_limit(kind: str) -> None:
    """Short and long documents, of which no length is a multiple of the segment."""
    options = {"memory": kind, "mem_len": 2, "compression_rate": 2, "compressed_len": 3}
    if kind != "compressive":
        del options["compressed_len"]
    case = SplitCase([[7, 25, 1, 4], [41, 2, 31]], 3, options, "document", target_num_chunks=9)
    with small_chunks(case):
        chunks, nats = case.plan(), sequential_nats(case)
        for chunk, sums in zip(chunks, case.scorer.scores(chunks), strict=True):
            assert sums.nats == pytest.approx(sum(nats[chunk.start : chunk.stop]), rel=1e-10)
    # If segments are no multiples of the rate, a slot's tokens depend on the document before.
    assert len(chunks) == 1 if kind == "compressive" else len(chunks) > 3
