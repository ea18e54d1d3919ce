"""Plots of evaluations: loss by position and by token frequency, and perplexity in a sweep.

The objects are those that `txl eval --json` prints. Every line of a plot is one of them; its label
has what differs between them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from txl_dist.reporting.figures import Figure, line_colours, new_figure

X_LABELS = {
    "document_position": "position of the target in its document, in tokens",
    "segment_position": "position of the query in its segment, in tokens",
    "token_frequency": "occurrences of the target's id",
}
"""By name of a table: the label of the x axis."""
LABELS = ("checkpoint", "split", "tgt_len", "mem_len", "clamp_len", "weights", "same_length")
SIZE_INCHES = (7.0, 4.2)
MAX_LINES_IN_LEGEND = 20


def plot_table(name: str, scored: Sequence[Mapping[str, Any]]) -> Figure:
    """Nats per token by bucket. Buckets with several values are drawn at their first one."""
    figure = new_figure(SIZE_INCHES)
    axes = figure.subplots()
    for number, (each, label) in enumerate(zip(scored, _labels(scored, LABELS), strict=True)):
        rows = each["details"][f"by_{name}"]
        axes.plot(
            [row["from"] for row in rows],
            [row["nats_per_token"] for row in rows],
            label=label,
            **_style(number, len(scored)),
        )
    if name != "segment_position":
        axes.set_xscale("symlog", base=2, linthresh=1)
    counted = {each["details"]["token_frequency_counted_on"] for each in scored}
    suffix = f" in split {', '.join(sorted(counted))}" if name == "token_frequency" else ""
    _finish(figure, X_LABELS[name] + suffix, "nats per token", len(scored))
    return figure


def plot_sweep(scored: Sequence[Mapping[str, Any]], swept: Sequence[str]) -> Figure:
    """Perplexity on the first split against the option with most values; a line per other setting.

    Values have equal distances on the x axis.
    """
    candidates = [each for each in scored if each["split"] == scored[0]["split"]]
    option = max(swept, key=lambda name: len({each[name] for each in candidates}))
    values = sorted({each[option] for each in candidates}, key=lambda value: value or 0)
    names = ["checkpoint", *(name for name in swept if name != option)]
    lines: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for each in candidates:
        lines.setdefault(tuple(each[name] for name in names), []).append(each)
    figure = new_figure(SIZE_INCHES)
    axes = figure.subplots()
    labels = _labels([line[0] for line in lines.values()], names)
    for number, (line, label) in enumerate(zip(lines.values(), labels, strict=True)):
        points = sorted((values.index(each[option]), each["perplexity"]) for each in line)
        axes.plot(*zip(*points, strict=True), label=label, **_style(number, len(lines)))
    selected = [each for each in candidates if each["selected"]]
    axes.plot(
        [values.index(each[option]) for each in selected],
        [each["perplexity"] for each in selected],
        linestyle="none",
        marker="*",
        markersize=12,
        color="black",
        label="selected",
    )
    axes.set_xticks(range(len(values)), [_show(value) for value in values])
    y_label = f"perplexity on split {candidates[0]['split']}"
    _finish(figure, f"{option} in tokens", y_label, len(lines))
    return figure


def _labels(scored: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """What differs between the objects, for each of them."""
    differing = [name for name in names if len({str(each[name]) for each in scored}) > 1]
    return [
        ", ".join(
            Path(str(each[name])).name if name == "checkpoint" else f"{name} {_show(each[name])}"
            for name in differing or names[:1]
        )
        for each in scored
    ]


def _show(value: Any) -> str:
    return "none" if value is None else str(value)


def _style(number: int, num_lines: int) -> dict[str, Any]:
    colour = line_colours(num_lines)[number]
    return {"color": colour, "marker": "osD^vP"[number % 6], "markersize": 3, "linewidth": 1.2}


def _finish(figure: Figure, x_label: str, y_label: str, num_lines: int) -> None:
    (axes,) = figure.axes
    axes.set_xlabel(x_label, parse_math=False)
    axes.set_ylabel(y_label, parse_math=False)
    axes.grid(visible=True, linewidth=0.3, color="0.8")
    if num_lines <= MAX_LINES_IN_LEGEND:
        for text in axes.legend(fontsize=7).get_texts():
            text.set_parse_math(False)
