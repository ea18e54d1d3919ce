"""Pieces: every target in one of them, warm enough, on the grid, and not wasteful."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hypothesis_examples import examples
from txl_dist.evaluation.pieces import SHORTEST_IN_WARM_UPS, Mode, Piece, overhead, plan_pieces

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
    pieces = plan_pieces(**shape)
    assert pieces[0].start == 0
    assert pieces[-1].stop == shape["num_targets"]
    assert all(a.stop == b.start for a, b in itertools.pairwise(pieces))
    assert all(piece.start < piece.stop for piece in pieces)


@quickly
@given(shape=shapes)
def test_all_but_the_end_lies_on_the_grid_of_segments(shape: dict) -> None:
    for piece in plan_pieces(**shape):
        assert piece.start % shape["tgt_len"] == piece.warm_start % shape["tgt_len"] == 0


@quickly
@given(shape=shapes)
def test_a_warm_up_reaches_back_through_every_layer_or_to_the_start(shape: dict) -> None:
    for piece in plan_pieces(**shape):
        assert piece.warm_start == max(0, piece.start - warm_tokens(shape))


@quickly
@given(shape=shapes, document_tokens=st.integers(1, 3000))
def test_it_goes_no_further_than_the_segment_of_the_documents_start(
    shape: dict, document_tokens: int
) -> None:
    asked = []

    def document_start(position: int) -> int:
        asked.append(position)
        return position // document_tokens * document_tokens

    for piece in plan_pieces(**shape, document_start=document_start):
        first = document_start(piece.start) // shape["tgt_len"] * shape["tgt_len"]
        expected = max(0, first, piece.start - warm_tokens(shape))
        assert piece.warm_start == min(piece.start, expected)
    assert max(asked) < shape["num_targets"]


@quickly
@given(shape=shapes)
def test_warm_up_never_costs_more_than_its_share(shape: dict) -> None:
    assert 0 <= overhead(plan_pieces(**shape)) <= 1 / SHORTEST_IN_WARM_UPS


def test_the_overhead_is_warm_up_over_scored() -> None:
    assert overhead([Piece(0, 0, 30), Piece(20, 30, 50)]) == 10 / 50


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_split_without_targets_is_refused(mode: Mode) -> None:
    with pytest.raises(ValueError, match="num_targets=0"):
        plan_pieces(num_targets=0, tgt_len=4, mem_len=4, n_layer=2, mode=mode)
