"""The charts of `txl report`, of one run or of several over each other.

They are small, so that their text is as large as that of the page on a screen of 360 pixels; wide
screens show several in a row. Backgrounds are transparent and what has no colour is black: in dark
mode the page inverts the lightness of all charts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from txl_dist.analysis.plots import Axes, draw_line, finish, new_figure, svg_bytes
from txl_dist.analysis.run_record import RunRecord, Series
from txl_dist.evaluation.result import Result

CHART_INCHES = (3.7, 2.6)
MAX_POINTS = 400
"""Longer series are drawn as means of this many parts."""
MAX_LABEL = 28
"""Characters of a label in a legend."""
CURVES = (
    ("Tokens per second", "tokens_per_second", False),
    ("Learning rate", "lr", False),
    ("Gradient norm before clipping", "gradient_norm", True),
    ("Share of the memory that is filled", "memory_valid", False),
)
"""Title, metric, whether the axis is logarithmic. The losses come first."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure of the page."""

    title: str
    description: str
    """What it shows, in words, for those who do not see it."""
    svg: bytes


def charts_of_runs(runs: Sequence[RunRecord]) -> Iterator[Chart]:
    """The charts that the runs have values for. The first one is the loss of training."""

    def by_run(metric: str | None) -> dict[str, Series]:
        is_one = len(runs) == 1
        return {
            metric if is_one and metric else run.name: run.series(metric or run.evaluated or "")
            for run in runs
        }

    lost = [point for run in runs for point in run.superseded]
    losses = by_run("loss")
    yield from _chart("Training loss in nats per token", losses, marked=runs, superseded=lost)
    if len(runs) > 1:  # their steps may have different numbers of tokens
        by_tokens = {
            run.name: [(run.tokens[n], y) for n, y in run.series("loss") if n in run.tokens]
            for run in runs
        }
        yield from _chart("Training loss by tokens", by_tokens, x_label="tokens")
    yield from _chart("Validation loss in nats per token", by_run(None), marked=runs)
    for title, metric, log_scale in CURVES:
        yield from _chart(title, by_run(metric), log_scale=log_scale)


def memory_chart(results: Sequence[Result]) -> Iterator[Chart]:
    """The loss by length of the memory, of models that were scored with several lengths."""
    lines: dict[tuple[Any, ...], list[Result]] = {}
    for each in results:
        lines.setdefault(each.settings, []).append(each)
    series = {
        f"{group[0].name}, {group[0].split}": sorted((r.mem_len, r.nats_per_token) for r in group)
        for group in lines.values()
        if len({each.mem_len for each in group}) > 1
    }
    title = "Loss by length of the memory in nats per token"
    yield from _chart(title, series, x_label="mem_len in tokens")


def thin_out(
    series: Series, max_points: int = MAX_POINTS
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Steps and values of at most `max_points` points, without NaN and Inf."""
    finite = [(step, value) for step, value in series if math.isfinite(value)]
    parts = np.array_split(np.array(finite, dtype=np.float64).reshape(-1, 2), max_points)
    means = [part.mean(axis=0) for part in parts if len(part)]
    steps, values = np.array(means).reshape(-1, 2).T
    return steps, values


def _short(label: str) -> str:
    """A label that leaves room for the lines."""
    half = MAX_LABEL // 2
    return label if len(label) <= MAX_LABEL else f"{label[:half]}…{label[-half:]}"


def _chart(
    title: str,
    series: Mapping[str, Series],
    *,
    x_label: str = "step",
    log_scale: bool = False,
    marked: Sequence[RunRecord] = (),
    superseded: Series = (),
) -> Iterator[Chart]:
    """`marked`: runs of which it shows where ranks were restarted and where a step has diverged.
    `superseded`: the losses of steps that a resume or a rollback has superseded.
    """
    series = {label: points for label, points in series.items() if points}
    if not series:
        return
    figure = new_figure(CHART_INCHES)
    axes = figure.subplots()
    for number, (label, points) in enumerate(series.items()):
        x, y = thin_out(points)
        draw_line(axes, x, y, label=_short(label), number=number, num_lines=len(series))
    if log_scale:
        axes.set_yscale("log", nonpositive="mask")
    if superseded:  # without a line: their steps come in pieces
        axes.plot(
            *zip(*superseded, strict=True), "x", color="0.4", markersize=4, label="superseded"
        )
    _mark_events(axes, marked)
    finish(axes, x_label, "")
    ends = [f"{label} {points[-1][1]:.4g} at {points[-1][0]:,}" for label, points in series.items()]
    text = f"At the end of the x axis ({x_label}): {'; '.join(ends)}."
    yield Chart(title, text, svg_bytes(figure, transparent=True))


def _mark_events(axes: Axes, runs: Sequence[RunRecord]) -> None:
    """Restarts as triangles at the bottom, diverged steps as crosses at the top."""
    restarts = [step for run in runs for step in run.steps_of("start")[1:]]
    diverged = [step for run in runs for step in run.steps_of("divergence")]
    across = axes.get_xaxis_transform()  # y from 0 at the bottom to 1 at the top
    for steps, marker, height, name in (
        (restarts, "^", 0.04, "restart"),
        (diverged, "X", 0.96, "diverged step"),
    ):
        if steps:
            axes.plot(
                steps, [height] * len(steps), marker, color="black", markersize=5,
                transform=across, label=f"{name} ({len(steps)})", clip_on=False,
            )  # fmt: skip
