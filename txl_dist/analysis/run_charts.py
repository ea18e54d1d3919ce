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

from txl_dist.analysis.plots import (
    MIN_SHARE,
    Axes,
    draw_line,
    finish,
    new_figure,
    power_bins,
    sum_over_bins,
    svg_bytes,
)
from txl_dist.analysis.run_record import RunRecord, Series
from txl_dist.analysis.run_results import Attention, Evaluation, Recl, curves_by_mem_len

CHART_INCHES = (3.7, 2.6)
MAX_POINTS = 400
"""Longer series are drawn as means of this many parts."""
MAX_MARK_LINES = 12
"""More restarts or diverged steps are drawn as marks without lines."""
MAX_LABEL = 28
"""Characters of a label in a legend."""
MAX_TICKS = 5
"""Of an axis of tokens; of a logarithmic one without 0."""
MAX_LAYERS = 5
"""Layers in the chart of attention."""
TIME_CHART = "Wall time by cause"


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure of the page."""

    title: str
    description: str
    """What it shows, in words, for those who do not see it."""
    svg: bytes


def charts_of_runs(runs: Sequence[RunRecord]) -> Iterator[Chart]:
    """The charts that the runs have values for. The first one is the loss of training."""
    losses = {_label(run, runs, "training"): run.series("loss") for run in runs}
    lost = [point for run in runs for point in run.superseded]
    yield from _by_step("Training loss in nats per token", losses, marked=runs, superseded=lost)
    yield from _by_tokens(runs)
    scores = {_label(run, runs, run.evaluated): run.series(run.evaluated or "") for run in runs}
    yield from _by_step("Validation loss in nats per token", scores, marked=runs)
    for title, name, log_scale in (
        ("Tokens per second", "tokens_per_second", False),
        ("Learning rate", "lr", False),
        ("Gradient norm before clipping", "gradient_norm", True),
        ("Share of the memory that is filled", "memory_valid", False),
    ):
        series = {_label(run, runs, name): run.series(name) for run in runs}
        yield from _by_step(title, series, log_scale=log_scale)
    yield from _time_chart(runs)


def _label(run: RunRecord, runs: Sequence[RunRecord], metric: str | None) -> str:
    return run.name if len(runs) > 1 else metric or ""


def _short(label: str) -> str:
    """A label that leaves room for the lines."""
    half = MAX_LABEL // 2
    return label if len(label) <= MAX_LABEL else f"{label[:half]}…{label[-half:]}"


def thin_out(
    series: Series, max_points: int = MAX_POINTS
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Steps and values of at most `max_points` points, without NaN and Inf."""
    finite = [(step, value) for step, value in series if math.isfinite(value)]
    parts = np.array_split(np.array(finite, dtype=np.float64).reshape(-1, 2), max_points)
    means = [part.mean(axis=0) for part in parts if len(part)]
    steps, values = np.array(means).reshape(-1, 2).T
    return steps, values


# --- curves by step -------------------------------------------------------------------------------


def _by_step(
    title: str,
    series: Mapping[str, Series],
    *,
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
        steps, values = thin_out(points)
        draw_line(axes, steps, values, label=_short(label), number=number, num_lines=len(series))
    if log_scale:
        axes.set_yscale("log", nonpositive="mask")
    if superseded:  # without a line: their steps come in pieces
        axes.plot(
            *zip(*superseded, strict=True), "x", color="0.4", markersize=4, label="superseded"
        )
    _mark_events(axes, marked)
    finish(axes, "step", "")
    ends = [f"{label} {points[-1][1]:.4g} at step {points[-1][0]:,}" for label, points in
            series.items()]  # fmt: skip
    yield Chart(title, f"At the end: {'; '.join(ends)}.", svg_bytes(figure, transparent=True))


def _by_tokens(runs: Sequence[RunRecord]) -> Iterator[Chart]:
    """For runs whose steps have different numbers of tokens."""
    series = {run.name: run.loss_by_tokens for run in runs if run.loss_by_tokens}
    ends = [(points[-1][0], run.last["step"]) for run in runs if (points := run.loss_by_tokens)]
    sizes = [tokens / step for tokens, step in ends if step]
    if not sizes or max(sizes) < 1.05 * min(sizes):
        return
    thin = {name: list(zip(*thin_out(points), strict=True)) for name, points in series.items()}
    yield from _lines("Training loss by tokens", thin, ("tokens", "nats per token"))


def _mark_events(axes: Axes, runs: Sequence[RunRecord]) -> None:
    """Restarts as triangles at the bottom, diverged steps as crosses at the top."""
    restarts = [start.step for run in runs for start in run.log.starts[1:]]
    diverged = [step for run in runs for step in run.log.divergences]
    across = axes.get_xaxis_transform()  # y from 0 at the bottom to 1 at the top
    for steps, marker, height, dashes, name in (
        (restarts, "^", 0.04, ":", "restart"),
        (diverged, "X", 0.96, "--", "diverged step"),
    ):
        if not steps:
            continue
        for step in steps if len(steps) <= MAX_MARK_LINES else ():
            axes.axvline(step, color="0.35", linestyle=dashes, linewidth=0.8)
        label = f"{name} ({len(steps)})"
        axes.plot(
            steps, [height] * len(steps), marker, color="black", markersize=5, transform=across,
            label=label, clip_on=False,
        )  # fmt: skip


# --- wall time ------------------------------------------------------------------------------------


def _time_chart(runs: Sequence[RunRecord]) -> Iterator[Chart]:
    """One horizontal bar per cause and run, the longest cause at the top."""
    shares = {
        run.name: {cause: spent / total for cause, spent in run.goodput.seconds.items()}
        for run in runs
        if run.goodput is not None and (total := sum(run.goodput.seconds.values())) > 0
    }
    if not shares:
        return
    sums: dict[str, float] = {}
    for by_cause in shares.values():
        for cause, share in by_cause.items():
            sums[cause] = sums.get(cause, 0.0) + share
    causes = sorted(sums, key=lambda cause: sums[cause])
    figure = new_figure((CHART_INCHES[0], max(CHART_INCHES[1], 0.22 * len(causes) * len(shares))))
    axes = figure.subplots()
    height = 0.8 / len(shares)
    for number, (name, by_cause) in enumerate(shares.items()):
        offset = (len(shares) - 1 - 2 * number) * height / 2
        places = np.arange(len(causes)) + offset
        values = [by_cause.get(cause, 0.0) for cause in causes]
        grey = f"{0.3 + 0.45 * number / max(1, len(shares) - 1):.2f}"
        hatch = ("", "////", "....", "xxxx")[number % 4]
        bars = axes.barh(
            places, values, height, color=grey, hatch=hatch, edgecolor="white", label=_short(name)
        )
        axes.bar_label(bars, [f" {value:.1%}" for value in values], fontsize=8)
    axes.set_yticks(range(len(causes)), causes)
    axes.set_xticks([])
    axes.tick_params(labelsize=8)
    axes.margins(x=0.18)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    if len(shares) > 1:
        axes.legend(fontsize=8, loc="lower right")
    text = "; ".join(
        f"{name}: {', '.join(f'{cause} {share:.1%}' for cause, share in by_cause.items())}"
        for name, by_cause in shares.items()
    )
    yield Chart(TIME_CHART, text, svg_bytes(figure, transparent=True))


# --- the worth of memory --------------------------------------------------------------------------


def memory_charts(
    evaluations: Sequence[Evaluation], recl: Sequence[Recl], attention: Sequence[Attention]
) -> Iterator[Chart]:
    """Loss by length of the memory and by position, by context, and attention by distance."""
    yield from _lines(
        "Loss by length of the memory",
        curves_by_mem_len(evaluations),
        ("mem_len in tokens", "nats per token"),
        log_from=16,
    )
    for table, title, axis in (
        ("document_position", "Loss by position in the document", "tokens since its start"),
        ("segment_position", "Loss by position in the segment", "position in the segment"),
    ):
        lines = {
            f"{each.name}, mem {each.mem_len}": [
                (bucket.start, bucket.nats_per_token)
                for bucket in getattr(each.details, f"by_{table}")
            ]
            for each in _with_details(evaluations)
        }
        log_from = 1 if table == "document_position" else None
        yield from _lines(title, lines, (axis, "nats per token"), log_from=log_from)
    for report in recl:
        lines = {
            model.name: [(point.context, point.nats) for point in model.curve]
            for model in report.models
        }
        title = f"Loss by context: {report.group} on {report.split}"
        yield from _lines(title, lines, ("context in tokens", "nats per token"))
    for each in attention:
        yield _attention_chart(each)


def _with_details(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Of each model and split, those with the shortest and the longest memory."""
    groups: dict[tuple[Any, ...], list[Evaluation]] = {}
    for each in evaluations:
        if each.details is not None:
            groups.setdefault(each.settings, []).append(each)
    shown = []
    for group in groups.values():
        group.sort(key=lambda each: each.mem_len)
        shown += [group[0]] if len(group) == 1 else [group[0], group[-1]]
    return shown


def _lines(
    title: str,
    lines: Mapping[str, Sequence[tuple[int, float]]],
    axis_labels: tuple[str, str],
    *,
    log_from: int | None = None,
) -> Iterator[Chart]:
    """`log_from`: the x axis is logarithmic from here on, and linear below."""
    lines = {label: points for label, points in lines.items() if points}
    if not lines:
        return
    figure = new_figure(CHART_INCHES)
    axes = figure.subplots()
    for number, (label, points) in enumerate(lines.items()):
        x, y = zip(*points, strict=True)
        draw_line(axes, x, y, label=_short(label), number=number, num_lines=len(lines))
    if log_from is not None:
        axes.set_xscale("symlog", base=2, linthresh=log_from)
        last = max(points[-1][0] for points in lines.values())
        powers = [2**n for n in range(last.bit_length()) if 2**n >= log_from]
        ticks = [0, *powers[:: -(-len(powers) // MAX_TICKS) or 1]]
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
    else:
        axes.locator_params(axis="x", nbins=MAX_TICKS)
    finish(axes, *axis_labels)
    texts = [f"{label}: {points[0][1]:.4f} at {points[0][0]:,}, {points[-1][1]:.4f} at "
             f"{points[-1][0]:,}" for label, points in lines.items()]  # fmt: skip
    yield Chart(title, "; ".join(texts), svg_bytes(figure, transparent=True))


def _attention_chart(attention: Attention) -> Chart:
    """Shares by distance, the mean of the heads of each layer; some layers if there are many."""
    mass_LHD = np.array(attention.heads.by_distance)
    edges = power_bins(mass_LHD.shape[-1])
    share_LX = np.maximum(sum_over_bins(mass_LHD.mean(1), edges), MIN_SHARE)
    even_X = np.maximum(sum_over_bins(np.array(attention.even.by_distance)[0, 0], edges), MIN_SHARE)
    layers = np.unique(np.linspace(0, len(mass_LHD) - 1, MAX_LAYERS).round().astype(int))
    figure = new_figure(CHART_INCHES)
    axes = figure.subplots()
    bin_X = np.arange(len(edges) - 1)
    axes.plot(bin_X, even_X, color="black", linestyle=":", linewidth=1.2, label="even")
    for number, layer in enumerate(layers.tolist()):
        label = f"layer {layer}"
        draw_line(axes, bin_X, share_LX[layer], label=label, number=number, num_lines=len(layers))
    axes.set_yscale("log")
    axes.set_xticks(bin_X, [f"{start:,}" for start in edges[:-1]], rotation=60)
    finish(axes, "distance in tokens: start of each bin", "share of attention")
    memory = f"{np.mean(attention.heads.memory):.0%} on memory"
    even = f"{np.mean(attention.even.memory):.0%} if all keys had equal weights"
    title = f"Attention by distance on {attention.settings.split}: {memory}"
    return Chart(
        title,
        f"{attention.num_queries:,} queries; {memory}, {even}.",
        svg_bytes(figure, transparent=True),
    )
