"""The plot: bins, one panel per layer, one line per head, and a title of plain text."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from txl_dist.reporting.attention_by_distance import AttentionByDistance, Mass
from txl_dist.reporting.attention_plot import (
    PLOT_NAMES,
    plot_attention,
    power_bins,
    sum_over_bins,
    write_plots,
)


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
    return AttentionByDistance(
        heads=mass(weights_LHD, tgt_len),
        even=mass(even_LHD, tgt_len),
        num_queries=11,
        tgt_len=tgt_len,
    )


def mass(by_distance_LHD: Tensor, tgt_len: int) -> Mass:
    return Mass(
        by_distance_LHD=by_distance_LHD,
        memory_LH=by_distance_LHD[..., tgt_len:].sum(-1),
        segment_LH=by_distance_LHD[..., :tgt_len].sum(-1),
    )


@given(num_distances=st.integers(1, 5000))
def test_bins_cover_every_distance_once(num_distances: int) -> None:
    edges = power_bins(num_distances)
    assert edges == sorted(set(edges))
    assert (edges[0], edges[-1]) == (0, num_distances)
    assert all(start.bit_count() == 1 for start in edges[1:-1])
    assert len(edges) <= 15
    assert (
        sum_over_bins(torch.ones(3, num_distances), edges).sum(-1).tolist() == [num_distances] * 3
    )


def test_a_bin_is_the_sum_of_its_distances() -> None:
    result = sum_over_bins(torch.arange(7.0), power_bins(7))
    assert result.tolist() == [0, 1, 2 + 3, 4 + 5 + 6]


@pytest.mark.parametrize(("tgt_len", "mem_len"), [(3, 5), (1, 0), (1, 4), (6, 0)])
def test_one_panel_per_layer_and_one_line_per_head(tgt_len: int, mem_len: int) -> None:
    result = attention(4, 2, tgt_len=tgt_len, mem_len=mem_len)
    figure = plot_attention(result, title="here")
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title().split(":")[0] for axes in panels] == [f"layer {n}" for n in range(4)]
    for layer, axes in enumerate(panels):
        assert f"{result.heads.memory_LH[layer].mean():.0%} on memory" in axes.get_title()
        lines = [line.get_label() for line in axes.get_lines()]
        assert sorted(line.split(":")[0] for line in lines if line.startswith("head")) == [
            "head 0",
            "head 1",
        ]
        marked = [text.get_text() for text in axes.texts]
        assert marked == (["memory only"] if mem_len else [])


def test_the_border_is_before_the_first_bin_that_is_only_memory() -> None:
    axes = plot_attention(attention(1, 2, tgt_len=4, mem_len=9), title="").axes[0]
    (border,) = (line.get_xdata()[0] for line in axes.get_lines() if line.get_linestyle() == "--")
    assert border == power_bins(13).index(4) - 0.5


@pytest.mark.parametrize("title", ["a $x^2 run_{1", "$\\undefined$", "runs/_a", "<&>", "模型"])
def test_a_title_is_plain_text(title: str, tmp_path: Path) -> None:
    png, svg = written(tmp_path, title)
    assert png.startswith(b"\x89PNG")
    assert b"<svg" in svg


def test_the_same_figure_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    assert written(tmp_path / "one", "a run") == written(tmp_path / "two", "a run")


def written(directory: Path, title: str) -> list[bytes]:
    """The files of a small plot."""
    write_plots(plot_attention(attention(1, 2, tgt_len=3, mem_len=2), title=title), directory)
    return [(directory / name).read_bytes() for name in PLOT_NAMES]
