"""Plots of context curves and of relative gains, with the threshold that defines RECL."""

import warnings
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from txl_dist.context.report import GroupReport

PLOT_NAMES = ("recl.png", "recl.svg")
MIN_GAIN = 1e-4
"""The axis of gains is logarithmic and starts here; smaller gains are drawn at this value."""


def plot_group(report: GroupReport) -> Figure:
    """Left: mean loss by context, with intervals. Right: gains by context, if there are any."""
    has_recl = bool(report.analysis.models[0].recl)
    figure = Figure(figsize=(12 if has_recl else 6.5, 4.6), layout="constrained")
    title = f"{report.group} on {report.split}: {report.num_positions:,} targets"
    figure.suptitle(title, fontsize=10, parse_math=False)
    panels = figure.subplots(1, 2 if has_recl else 1, squeeze=False)[0]
    # Up to 0.9 of the colour map: its end is a yellow that is hard to see on white.
    colours = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.9, len(report.models)))
    _draw_curves(panels[0], report, colours)
    if has_recl:
        _draw_gains(panels[1], report, colours)
    for axes in panels:
        axes.set_xlabel("context c in tokens", fontsize=9)
        axes.grid(visible=True, linewidth=0.3, color="0.8")
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=8)
    return figure


def write_plots(figure: Figure, directory: Path) -> None:
    """Write the files PLOT_NAMES. The same figure gives the same bytes."""
    # Without a salt the ids in the SVG are random. Version and date are left out of the metadata.
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "txl"}):
        # A character of the title that is missing in the font is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(directory / PLOT_NAMES[0], dpi=150, metadata={"Software": None})
        figure.savefig(directory / PLOT_NAMES[1], metadata={"Date": None, "Creator": None})


def _draw_curves(axes: Axes, report: GroupReport, colours: np.ndarray) -> None:
    for model, analysis, colour in zip(report.models, report.analysis.models, colours, strict=True):
        columns = [(p.context, p.nats, p.low, p.high) for p in analysis.curve]
        context, nats, low, high = (list(column) for column in zip(*columns, strict=True))
        axes.plot(context, nats, color=colour, marker="o", markersize=3, label=_plain(model.name))
        axes.fill_between(context, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_ylabel("nats per token after exactly c tokens", fontsize=9)


def _draw_gains(axes: Axes, report: GroupReport, colours: np.ndarray) -> None:
    """For the smallest r, which has the hardest targets."""
    for model, analysis, colour in zip(report.models, report.analysis.models, colours, strict=True):
        result = min(analysis.recl, key=lambda result: result.r)
        gains = np.maximum(result.length.gains, MIN_GAIN)
        sign = "≥ " if result.length.is_lower_bound else ""
        label = f"{model.name}: RECL {sign}{result.length.recl:,}"
        axes.plot(
            report.contexts[:-1], gains, color=colour, marker="o", markersize=3, label=_plain(label)
        )
        axes.set_ylabel(
            f"relative gain of {report.delta} more tokens, r = {result.r:g}", fontsize=9
        )
    axes.axhline(report.threshold, color="0.35", linestyle="--", linewidth=0.9, label="threshold")
    axes.set_yscale("log")


def _plain(text: str) -> str:
    """A label without math mode, which `$` would start; a leading `_` would hide it."""
    return f" {text}".replace("$", r"\$")
