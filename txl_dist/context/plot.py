"""Plots of context curves and of relative gains, with the threshold that defines RECL."""

from pathlib import Path

import numpy as np

from txl_dist.context.report import GroupReport
from txl_dist.reporting.figures import (
    Axes,
    Figure,
    line_colours,
    new_figure,
    plain_label,
    write_figure,
)

PLOT_NAMES = ("recl.png", "recl.svg")
MIN_GAIN = 1e-4
"""The axis of gains is logarithmic and starts here; smaller gains are drawn at this value."""


def plot_group(report: GroupReport) -> Figure:
    """Left: mean loss by context, with intervals. Right: gains by context, if there are any."""
    has_recl = bool(report.analysis.models[0].recl)
    title = f"{report.group} on {report.split}: {report.num_positions:,} targets"
    figure = new_figure((12 if has_recl else 6.5, 4.6), title=title)
    panels = figure.subplots(1, 2 if has_recl else 1, squeeze=False)[0]
    colours = line_colours(len(report.models))
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
    write_figure(figure, directory, "recl")


def _draw_curves(axes: Axes, report: GroupReport, colours: np.ndarray) -> None:
    for model, analysis, colour in zip(report.models, report.analysis.models, colours, strict=True):
        columns = [(p.context, p.nats, p.low, p.high) for p in analysis.curve]
        context, nats, low, high = (list(column) for column in zip(*columns, strict=True))
        axes.plot(
            context, nats, color=colour, marker="o", markersize=3, label=plain_label(model.name)
        )
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
            report.contexts[:-1],
            gains,
            color=colour,
            marker="o",
            markersize=3,
            label=plain_label(label),
        )
        axes.set_ylabel(
            f"relative gain of {report.delta} more tokens, r = {result.r:g}", fontsize=9
        )
    axes.axhline(report.threshold, color="0.35", linestyle="--", linewidth=0.9, label="threshold")
    axes.set_yscale("log")
