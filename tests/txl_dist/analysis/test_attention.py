"""Attention by distance counts the weights of each scored query once, for any chunks and batch.

The reference reads the split in one pass with a memory of inputs, and sums the weights in a plain
loop over queries and keys. It uses nothing of the package except the model.

The plot: bins, one panel per layer, one line per head, and a title of plain text.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.hypothesis_examples import examples
from tests.support.small_models import small_model
from tests.support.split_case import SplitCase
from txl_dist.analysis.attention import (
    AttentionByDistance,
    Mass,
    attention_by_distance,
)
from txl_dist.analysis.plots import (
    plot_attention,
    power_bins,
    sum_over_bins,
    write_figure,
)
from txl_dist.errors import CheckpointError, ConfigError

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
                equal_1 = torch.full((1,), 1 / len(keys), dtype=torch.float64)
                add(even, 0, equal_1, *distance_in_memory)
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


@pytest.mark.parametrize("kind", ["compressive", "tokens"])
def test_keys_that_are_not_tokens_are_refused(kind: str) -> None:
    case = Case(
        lengths=[[9]], tgt_len=4, model_options={"memory": kind}, reset="document",
        batch_chunks=1, max_tokens=None,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=f"model.memory={kind}: its keys are not one token each"):
        case.measure()


@examples(40)
@given(case=cases)
def test_it_equals_the_sums_of_a_plain_loop_over_one_pass(case: Case) -> None:
    result, (heads, even) = case.measure(), plain_mass(case)
    assert result.num_queries == case.num_targets, "every scored query once"
    assert_same(result.heads, heads)
    assert_same(result.even, even)
    for mass in (result.heads, result.even):
        ones_LH = torch.ones_like(mass.memory_LH)
        torch.testing.assert_close(mass.by_distance_LHD.sum(-1), ones_LH, **CLOSE)
        torch.testing.assert_close(mass.memory_LH + mass.segment_LH, ones_LH, **CLOSE)


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
    with pytest.raises(CheckpointError, match=r"layer 1.*NaN or Inf"):
        Case([[20, 3], [41]], tgt_len=3, model_options={}, reset="stream").measure()


# --- the plot -------------------------------------------------------------------------------------


def attention(
    num_layers: int, num_heads: int, *, tgt_len: int, mem_len: int
) -> AttentionByDistance:
    """Random heads; one of them attends to the query itself only."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_layers, num_heads, tgt_len + mem_len)
    weights_LHD = torch.rand(shape, generator=generator, dtype=torch.float64).softmax(-1)
    weights_LHD[0, 0] = 0
    weights_LHD[0, 0, 0] = 1
    even_LHD = torch.full((1, 1, shape[-1]), 1 / shape[-1], dtype=torch.float64)
    heads, even = (
        Mass(
            by_distance_LHD=mass_LHD,
            memory_LH=mass_LHD[..., tgt_len:].sum(-1),
            segment_LH=mass_LHD[..., :tgt_len].sum(-1),
        )
        for mass_LHD in (weights_LHD, even_LHD)
    )
    return AttentionByDistance(heads=heads, even=even, num_queries=11, tgt_len=tgt_len)


@given(num_distances=st.integers(1, 5000))
def test_bins_cover_every_distance_once(num_distances: int) -> None:
    edges = power_bins(num_distances)
    assert edges == sorted(set(edges))
    assert (edges[0], edges[-1]) == (0, num_distances)
    assert all(start.bit_count() == 1 for start in edges[1:-1])
    assert len(edges) <= 15
    sizes = np.diff(edges).tolist()
    assert sum_over_bins(torch.ones(3, num_distances), edges).tolist() == [sizes] * 3


@pytest.mark.parametrize(("tgt_len", "mem_len"), [(3, 5), (1, 0), (4, 9), (6, 0)])
def test_one_panel_per_layer_and_one_line_per_head(tgt_len: int, mem_len: int) -> None:
    result = attention(4, 2, tgt_len=tgt_len, mem_len=mem_len)
    figure = plot_attention(result, title="here")
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title().split(":")[0] for axes in panels] == [f"layer {n}" for n in range(4)]
    for layer, axes in enumerate(panels):
        assert f"{result.heads.memory_LH[layer].mean():.0%} on memory" in axes.get_title()
        lines = {line.get_label().split(":")[0]: line for line in axes.get_lines()}
        assert {"head 0", "head 1"} <= set(lines)
        assert ("memory only" in lines) == (mem_len > 0)
        if tgt_len == 4:
            border = lines["memory only"].get_xdata()[0]
            assert border == power_bins(13).index(4) - 0.5, "before the first bin of memory alone"


def test_a_title_is_plain_text_and_the_same_figure_has_the_same_bytes(tmp_path: Path) -> None:
    for title in ("a $x^2 run_{1", "$\\undefined$", "runs/_a", "<&>", "模型"):
        figures = [
            plot_attention(attention(1, 2, tgt_len=3, mem_len=2), title=title) for _ in range(2)
        ]
        names = write_figure(figures[0], tmp_path, "attention")
        first = [(tmp_path / name).read_bytes() for name in names]
        assert first[0].startswith(b"\x89PNG")
        assert b"<svg" in first[1]
        write_figure(figures[1], tmp_path, "attention")
        assert [(tmp_path / name).read_bytes() for name in names] == first
