"""Plot of attention by distance: one panel per layer, one line per head.

Distances are binned by powers of two (0, 1, 2-3, 4-7, ...), so thousands of distances fit in a
panel. A point is the sum of its bin, and the points of a line add up to 1. Heads are coloured by
the rank of their mean distance.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from txl_dist.reporting.attention_by_distance import AttentionByDistance
from txl_dist.reporting.figures import Axes, Figure, line_colours, new_figure, write_figure

PLOT_NAMES = ("attention.png", "attention.svg")
MOST_COLUMNS = 3
PANEL_INCHES = (5.0, 3.1)
HEADS_PER_COLUMN = 22
"""Heads per column of the legend, to the right of its panel."""
MIN_SHARE = 1e-4
"""The y axis is logarithmic and starts here; smaller shares are drawn at this value."""


def power_bins(num_distances: int) -> list[int]:
    """Edges of the bins: their starts 0, 1, 2, 4, ..., then the end of the last one."""
    starts = [0, *(2**power for power in range((num_distances - 1).bit_length()))]
    return [*starts, num_distances]


def sum_over_bins(mass: Tensor, edges: Sequence[int]) -> Tensor:
    """Sums over [edges[k], edges[k + 1]) of the last dimension."""
    widths = [stop - start for start, stop in pairwise(edges)]
    return torch.stack([part.sum(-1) for part in mass.split(widths, dim=-1)], dim=-1)


def plot_attention(attention: AttentionByDistance, *, title: str) -> Figure:
    """Draw all layers. `title` is plain text: `$` and `_` have no special meaning."""
    num_layers = len(attention.heads.by_distance_LHD)
    columns = min(num_layers, MOST_COLUMNS)
    rows = -(-num_layers // columns)
    size = (PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows + 0.7)
    figure = new_figure(size, title=title)
    # Equal axes make the panels comparable.
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for layer, axes in enumerate(panels):
        if layer < num_layers:
            _draw_layer(axes, attention, layer)
        else:
            axes.set_axis_off()
    figure.supxlabel("distance in tokens from query back to key: start of each bin", fontsize=9)
    figure.supylabel("share of a head's attention in the bin", fontsize=9)
    return figure


def write_plots(figure: Figure, directory: Path) -> None:
    """Write the files PLOT_NAMES. The same figure gives the same bytes."""
    write_figure(figure, directory, "attention")


def _draw_layer(axes: Axes, attention: AttentionByDistance, layer: int) -> None:
    heads, even = attention.heads, attention.even
    edges = power_bins(heads.by_distance_LHD.shape[-1])
    # X: bins
    mass_HX = sum_over_bins(heads.by_distance_LHD[layer], edges).clamp(min=MIN_SHARE).numpy()
    even_X = sum_over_bins(even.by_distance_LHD[0, 0], edges).clamp(min=MIN_SHARE).numpy()
    mean_H = heads.mean_distance[layer].tolist()
    bin_X = np.arange(len(edges) - 1)
    axes.plot(bin_X, even_X, color="black", linestyle=":", linewidth=1.2, label="even")
    colours = line_colours(len(mean_H))
    for rank, head in enumerate(sorted(range(len(mean_H)), key=lambda head: mean_H[head])):
        axes.plot(
            bin_X,
            mass_HX[head],
            color=colours[rank],
            marker="osD^vP"[rank % 6],
            markersize=3,
            linewidth=1,
            label=f"head {head}: mean {mean_H[head]:,.0f}",
        )
    _mark_memory(axes, attention, len(bin_X))
    axes.set_yscale("log")
    axes.set_ylim(MIN_SHARE, 1.3)
    axes.set_xticks(bin_X, [f"{start:,}" for start in edges[:-1]], fontsize=7, rotation=45)
    axes.tick_params(axis="x", labelbottom=True)  # sharex hides them except in the last row.
    axes.tick_params(axis="y", labelsize=7)
    axes.grid(visible=True, linewidth=0.3, color="0.8")
    axes.set_title(
        f"layer {layer}: {heads.memory_LH[layer].mean():.0%} on memory "
        f"(even: {even.memory_LH[0, 0]:.0%})",
        fontsize=9,
    )
    axes.legend(
        fontsize=5.5,
        loc="upper left",
        bbox_to_anchor=(1, 1),
        frameon=False,
        ncols=len(mean_H) // HEADS_PER_COLUMN + 1,
    )


def _mark_memory(axes: Axes, attention: AttentionByDistance, num_bins: int) -> None:
    """Shade the distances of at least `tgt_len`, where all keys are in memory."""
    if attention.heads.by_distance_LHD.shape[-1] == attention.tgt_len:
        return
    # Bin k starts at distance 2**(k - 1) and is drawn from k - 1/2 to k + 1/2.
    border = np.log2(attention.tgt_len) + 0.5
    axes.axvline(border, color="0.35", linestyle="--", linewidth=0.9)
    axes.axvspan(border, num_bins - 0.5, color="0.93", zorder=0)
    axes.text(border + 0.08, 1.3 * MIN_SHARE, "memory only", fontsize=6, rotation=90, color="0.3")
    axes.set_xlim(-0.5, num_bins - 0.5)
