"""Chunks: every target in one of them, warm enough, on the grid, and not wasteful."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.hypothesis_examples import examples
from txl_dist.evaluation.chunks import (
    MIN_CONTEXTS_PER_CHUNK,
    EvaluationChunk,
    Mode,
    overhead,
    plan_chunks,
)

shapes = st.fixed_dictionaries(
    {
        "num_targets": st.integers(1, 20_000),
        "tgt_len": st.integers(1, 70),
        "mem_len": st.integers(0, 150),
        "n_layer": st.integers(1, 5),
        "mode": st.sampled_from(["exact", "fast"]),
    }
)
quickly = examples(150)


def warm_tokens(shape: dict) -> int:
    """ceil(mem_len / tgt_len) segments a layer, or one layer's in `fast` mode."""
    memory_segments = -(-shape["mem_len"] // shape["tgt_len"])
    layers = shape["n_layer"] if shape["mode"] == "exact" else 1
    return layers * memory_segments * shape["tgt_len"]


@quickly
@given(shape=shapes)
def test_the_pieces_score_every_target_exactly_once_in_order(shape: dict) -> None:
    chunks = plan_chunks(**shape)
    assert chunks[0].start == 0
    assert chunks[-1].stop == shape["num_targets"]
    assert all(a.stop == b.start for a, b in itertools.pairwise(chunks))
    assert all(chunk.start < chunk.stop for chunk in chunks)


@quickly
@given(shape=shapes)
def test_all_but_the_end_lies_on_the_grid_of_segments(shape: dict) -> None:
    for chunk in plan_chunks(**shape):
        assert chunk.start % shape["tgt_len"] == chunk.context_start % shape["tgt_len"] == 0


@quickly
@given(shape=shapes)
def test_a_warm_up_reaches_back_through_every_layer_or_to_the_start(shape: dict) -> None:
    for chunk in plan_chunks(**shape):
        assert chunk.context_start == max(0, chunk.start - warm_tokens(shape))


@quickly
@given(shape=shapes, document_tokens=st.integers(1, 3000))
def test_it_goes_no_further_than_the_segment_of_the_documents_start(
    shape: dict, document_tokens: int
) -> None:
    asked = []

    def document_start(position: int) -> int:
        asked.append(position)
        return position // document_tokens * document_tokens

    for chunk in plan_chunks(**shape, document_start=document_start):
        first = document_start(chunk.start) // shape["tgt_len"] * shape["tgt_len"]
        expected = max(0, first, chunk.start - warm_tokens(shape))
        assert chunk.context_start == min(chunk.start, expected)
    assert max(asked) < shape["num_targets"]


@quickly
@given(shape=shapes)
def test_warm_up_never_costs_more_than_its_share(shape: dict) -> None:
    assert 0 <= overhead(plan_chunks(**shape)) <= 1 / MIN_CONTEXTS_PER_CHUNK


def test_the_overhead_is_warm_up_over_scored() -> None:
    assert overhead([EvaluationChunk(0, 0, 30), EvaluationChunk(20, 30, 50)]) == 10 / 50


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_split_without_targets_is_refused(mode: Mode) -> None:
    with pytest.raises(ValueError, match="num_targets=0"):
        plan_chunks(num_targets=0, tgt_len=4, mem_len=4, n_layer=2, mode=mode)
