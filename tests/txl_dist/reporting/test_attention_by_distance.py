"""Attention by distance counts the weights of each scored query once, for any chunks and batch.

The reference reads the split in one pass with a memory of inputs, and sums the weights in a plain
loop over queries and keys. It uses nothing of the package except the model.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from data_pipeline.streams.segments import Reset
from tests.support.hypothesis_examples import examples
from tests.support.small_models import small_model
from tests.support.split_case import SplitCase
from txl_dist.errors import CheckpointError
from txl_dist.reporting.attention_by_distance import (
    AttentionByDistance,
    Mass,
    attention_by_distance,
)

CLOSE = {"rtol": 0, "atol": 1e-9}


@dataclass(frozen=True)
class Case(SplitCase):
    """A split and a model whose attention is measured."""

    target_num_chunks: int = 5

    @property
    def num_targets(self) -> int:
        num_tokens = sum(map(sum, self.lengths))
        return min(num_tokens, self.max_tokens or num_tokens) - 1

    def measure(self) -> AttentionByDistance:
        chunks = self.plan()
        calls: list[tuple[int, int]] = []
        result = attention_by_distance(self.scorer, chunks, on_progress=lambda *n: calls.append(n))
        assert calls[-1] == (len(chunks), len(chunks))
        return result


def plain_mass(case: Case) -> tuple[Mass, Mass]:
    """Shares of the heads, and for equal weights, summed over one pass, query by query."""
    model, source = case.model, case.source
    config, tgt_len = model.config, case.tgt_len
    tokens = [token for document in source.documents for token in document]
    ages = list(range(len(tokens)))
    if case.reset == "document":
        ages = [age for document in source.documents for age in range(len(document))]
    shape, mem_len = (config.n_layer, config.n_head), config.mem_len
    heads, even = empty_mass(*shape, mem_len + tgt_len), empty_mass(1, 1, mem_len + tgt_len)
    memory = model.empty_memory(1)
    for start in range(0, case.num_targets, tgt_len):
        segment = slice(start, start + tgt_len)
        shown: dict[int, Tensor] = {}
        # Whole segments: `absolute` numbers the tokens from the end of the segment.
        columns = (torch.tensor([(column + [0] * tgt_len)[segment]]) for column in (tokens, ages))
        with torch.no_grad():
            _, memory = model.hidden(*columns, memory, on_attention_weights=shown.__setitem__)
        for query, age in enumerate(ages[start : min(segment.stop, case.num_targets)]):
            reach = min(age, mem_len - 1) if config.same_length else age
            keys = [key for key in range(mem_len + query + 1) if mem_len + query - key <= reach]
            for key in keys:
                distance_in_memory = (mem_len + query - key, key < mem_len)
                for layer, weight_BHTS in shown.items():
                    add(heads, layer, weight_BHTS[0, :, query, key], *distance_in_memory)
                add(
                    even,
                    0,
                    torch.full((1,), 1 / len(keys), dtype=torch.float64),
                    *distance_in_memory,
                )
    for mass in (heads, even):
        for tensor in (mass.by_distance_LHD, mass.memory_LH, mass.segment_LH):
            tensor.div_(case.num_targets)
    return heads, even


def empty_mass(num_layers: int, num_heads: int, num_distances: int) -> Mass:
    zeros = torch.zeros(num_layers, num_heads, num_distances, dtype=torch.float64)
    return Mass(
        by_distance_LHD=zeros, memory_LH=zeros[..., 0].clone(), segment_LH=zeros[..., 0].clone()
    )


def add(mass: Mass, layer: int, weight_H: Tensor, distance: int, in_memory: bool) -> None:
    mass.by_distance_LHD[layer, :, distance] += weight_H
    (mass.memory_LH if in_memory else mass.segment_LH)[layer] += weight_H


def assert_same(these: Mass, those: Mass) -> None:
    torch.testing.assert_close(these.by_distance_LHD, those.by_distance_LHD, **CLOSE)
    torch.testing.assert_close(these.memory_LH, those.memory_LH, **CLOSE)
    torch.testing.assert_close(these.segment_LH, those.segment_LH, **CLOSE)


with_memory = st.fixed_dictionaries(
    {
        "n_layer": st.integers(1, 3),
        "mem_len": st.integers(1, 8),
        "clamp_len": st.just(3),
        "same_length": st.booleans(),
        "distance_encoding": st.sampled_from(["sinusoidal", "shaw"]),
        "attention": st.sampled_from(["auto", "reference"]),
    }
)
without_memory = st.just({"mem_len": 0, "distance_encoding": "absolute"}) | st.just({"mem_len": 0})
cases = st.builds(
    Case,
    lengths=st.lists(
        st.lists(st.one_of(st.integers(1, 4), st.integers(9, 20)), min_size=1, max_size=3),
        min_size=1,
        max_size=2,
    ).filter(lambda lengths: sum(map(sum, lengths)) >= 2),
    tgt_len=st.integers(1, 5),
    model_options=with_memory | without_memory,
    reset=st.sampled_from(["document", "stream"]),
    batch_chunks=st.integers(1, 4),
    target_num_chunks=st.integers(1, 30),
    max_tokens=st.none() | st.integers(2, 30),
)


@examples(25)
@given(case=cases)
def test_it_equals_the_sums_of_a_plain_loop_over_one_pass(case: Case) -> None:
    result, (heads, even) = case.measure(), plain_mass(case)
    assert result.num_queries == case.num_targets, "every scored query once"
    assert_same(result.heads, heads)
    assert_same(result.even, even)


@examples(40)
@given(case=cases)
def test_the_shares_of_every_head_add_up_to_1(case: Case) -> None:
    result = case.measure()
    for mass in (result.heads, result.even):
        ones_LH = torch.ones_like(mass.memory_LH)
        torch.testing.assert_close(mass.by_distance_LHD.sum(-1), ones_LH, **CLOSE)
        torch.testing.assert_close(mass.memory_LH + mass.segment_LH, ones_LH, **CLOSE)
        beyond_LHD = mass.by_distance_LHD[..., case.tgt_len :]
        assert (beyond_LHD.sum(-1) <= mass.memory_LH + 1e-9).all(), "far keys are in memory"


LONG = Case([[20, 3], [41]], tgt_len=3, model_options={"mem_len": 7}, reset="stream")


@pytest.mark.parametrize("reset", ["document", "stream"])
def test_batch_and_number_of_chunks_change_nothing(reset: Reset) -> None:
    case = replace(LONG, reset=reset)
    one = replace(case, batch_chunks=1, target_num_chunks=1).measure()
    for batch_chunks, target_num_chunks in [(1, 30), (2, 7), (100, 30)]:
        other = replace(
            case, batch_chunks=batch_chunks, target_num_chunks=target_num_chunks
        ).measure()
        assert_same(other.heads, one.heads)
        assert_same(other.even, one.even)


@pytest.mark.parametrize("longest", [1, 2, 5])
def test_no_attention_goes_past_the_start_of_a_document(longest: int) -> None:
    case = replace(LONG, lengths=[[longest] * 9], reset="document")
    beyond_LHD = case.measure().heads.by_distance_LHD[..., longest:]
    assert (beyond_LHD == 0).all()
    over_documents = replace(case, reset="stream").measure().heads.by_distance_LHD[..., longest:]
    assert (over_documents.sum(-1) > 0).all(), "the test can fail"


def test_without_memory_all_attention_is_in_the_segment() -> None:
    options = {"mem_len": 0, "distance_encoding": "absolute"}
    heads = replace(LONG, model_options=options).measure().heads
    assert heads.by_distance_LHD.shape[-1] == LONG.tgt_len
    assert (heads.memory_LH == 0).all()


def test_mean_distance_and_reach_of_known_shares() -> None:
    by_distance = torch.tensor([[[0.5, 0.1, 0.4], [0.7, 0.3, 0.0]]], dtype=torch.float64)
    mass = Mass(
        by_distance_LHD=by_distance, memory_LH=torch.zeros(1, 2), segment_LH=torch.ones(1, 2)
    )
    torch.testing.assert_close(mass.mean_distance, torch.tensor([[0.9, 0.3]]).double())
    # The heads' average is 0.6, 0.2, 0.2.
    assert [mass.reach(share).tolist() for share in (0.5, 0.7, 0.9)] == [[0], [1], [2]]


def test_weights_that_are_not_finite_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(seed=4)
    with torch.no_grad():
        model.layers[1].attention.query.weight.fill_(1e308)
    monkeypatch.setattr(Case, "model", model)
    with pytest.raises(CheckpointError, match=r"layer 1.*not finite"):
        LONG.measure()
