"""Charts of a run by step, as SVG: loss, optimizer, speed, wall time by cause."""

import math
from collections.abc import Iterator

import numpy as np

from txl_dist.reporting.figures import Axes, Figure, new_figure, svg_bytes
from txl_dist.reporting.run_record import RunRecord, Series

MAX_POINTS = 1000
"""Longer series are drawn as means of this many parts."""
_INCHES = (8.0, 2.9)


def draw_charts(run: RunRecord) -> Iterator[tuple[str, bytes]]:
    """(title, SVG) of every chart that the run has values for."""
    loss = ("loss", *((run.evaluated,) if run.evaluated else ()))
    for title, names, log_scale in (
        ("Loss in nats per token", loss, False),
        ("Learning rate", ("lr",), False),
        ("Gradient norm before clipping", ("gradient_norm",), True),
        ("Tokens per second", ("tokens_per_second",), False),
        ("Share of the memory that is filled", ("memory_valid",), False),
    ):
        series = {name: run.series(name) for name in names if run.series(name)}
        if series:
            yield title, svg_bytes(_by_step(series, log_scale=log_scale))
    if run.goodput is not None and sum(run.goodput.seconds.values()) > 0:
        yield "Wall time by cause", svg_bytes(_bars(run.goodput.seconds))


def thin_out(series: Series, max_points: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of at most `max_points` points, without values that are not finite."""
    finite = [(step, value) for step, value in series if math.isfinite(value)]
    steps, values = np.array(finite, dtype=np.float64).reshape(-1, 2).T
    if len(steps) <= max_points:
        return steps, values
    starts = np.arange(max_points) * len(steps) // max_points
    sizes = np.diff(np.append(starts, len(steps)))
    return (
        np.add.reduceat(steps, starts) / sizes,
        np.add.reduceat(values, starts) / sizes,
    )


def _by_step(series: dict[str, Series], *, log_scale: bool) -> Figure:
    figure = new_figure(_INCHES)
    axes: Axes = figure.subplots()
    for name, points in series.items():
        steps, values = thin_out(points)
        is_sparse = len(steps) < 60
        axes.plot(steps, values, marker="." if is_sparse else "", linewidth=1.2, label=name)
    if log_scale and min(thin_out(points)[1].min(initial=1.0) for points in series.values()) > 0:
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if len(series) > 1:
        axes.legend(frameon=False)
    return figure


def _bars(seconds: dict[str, float]) -> Figure:
    """One horizontal bar per cause, the longest at the top."""
    figure = new_figure(_INCHES)
    axes: Axes = figure.subplots()
    causes = sorted(seconds, key=lambda cause: seconds[cause])
    total = sum(seconds.values())
    bars = axes.barh(causes, [seconds[cause] for cause in causes])
    axes.bar_label(bars, [f" {seconds[cause] / total:.1%}" for cause in causes])
    axes.set_xlabel("seconds")
    axes.margins(x=0.12)
    return figure
