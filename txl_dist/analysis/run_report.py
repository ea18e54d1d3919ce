"""`txl report`: one HTML page about a run, or about several compared.

    RunRecord (run_record.py) -> facts, curves, tables -> page

The curves of one run are drawn by step, with its restarts and the steps that have diverged. Those
of several runs are drawn over each other by tokens, because their steps may differ in size.

The page needs no other file and has no scripts. All text is escaped: that of a run may contain
anything. Tables and long lines scroll in their boxes, so that a screen of 360 pixels shows the page
without scrolling sideways.
"""

import base64
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

import numpy as np

from txl_dist.analysis.plots import Axes, draw_line, finish, new_figure, svg_bytes
from txl_dist.analysis.run_record import RunRecord, Series, differing_settings
from txl_dist.evaluation.result import Result, table_columns
from txl_dist.evaluation.scores import SCORES
from txl_dist.events import ENDS, last_start, newest_attempt, of_kind
from txl_dist.training.goodput import LOSSES, STEPS, WallTime

_STYLE = """
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 76rem;
  margin: 0 auto; padding: 1rem; overflow-wrap: anywhere }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; border-bottom: 1px solid #d0d0d0 }
.box { overflow-x: auto }
table { border-collapse: collapse; font-size: .95rem; font-variant-numeric: tabular-nums }
td, th { padding: .2rem 1rem .2rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid #d0d0d0 }
pre { overflow: auto; max-height: 32rem; background: #f5f5f5; padding: .7rem; font-size: .8rem }
.charts { display: grid; gap: 1.2rem 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)) }
figure { margin: 0; max-width: 34rem } figure img { width: 100%; height: auto; display: block }
"""


def run_page(runs: Sequence[RunRecord]) -> str:
    """The whole page. `runs` has at least one run."""
    title = escape(runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared")
    sections = (f"<h2>{name}</h2>\n{content}\n" for name, content in _sections(runs) if content)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # An icon of the page itself: browsers would ask a server for one.
        '<link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n"
        f"<h1>{title}</h1>\n{''.join(sections)}</body></html>\n"
    )


def _sections(runs: Sequence[RunRecord]) -> Iterator[tuple[str, str]]:
    """Heading and HTML of each section; without HTML it is left out."""
    names = [run.name for run in runs]
    yield "Not shown", _text("\n".join(f"{run.name}: {n}" for run in runs for n in run.notes))
    facts = [_facts(run) for run in runs]
    yield (
        "Runs",
        _table(("", *names), ((name, *(each[name] or "-" for each in facts)) for name in facts[0])),
    )
    if len(runs) > 1:
        yield "Settings that differ", _table(("setting", *names), differing_settings(runs))
    yield "Curves", _charts(charts_of_runs(runs))
    yield "Wall time by cause", _table(("cause", *names), _wall_time(runs))
    results = {each.key: each for run in runs for each in run.results}
    yield "Scores by txl eval", _scores([*results.values()])
    for run in runs if len(runs) == 1 else ():
        yield "Events", _text("\n".join(f"{_date(each.time)}  {each.text}" for each in run.events))
        yield "Config", _text(run.config)


# --- facts and tables -----------------------------------------------------------------------------


def _facts(run: RunRecord) -> dict[str, str]:
    """The same names for every run; empty what is not known."""
    attempt, best, times = newest_attempt(run.events), run.best, run.series("time")
    wall_time = WallTime.of(run.events)
    return {
        "parameters": f"{attempt.num_parameters:,}" if attempt else "",
        "weights at the start": attempt.origin or "random" if attempt else "",
        "ranks": f"{attempt.num_ranks} on {attempt.device}" if attempt else "",
        "computation": attempt.computation if attempt else "",
        "machine of rank 0": f"{attempt.host}: {attempt.machine}" if attempt else "",
        "steps": f"{run.last_step:,}" + (f" of {attempt.num_steps:,}" if attempt else ""),
        "tokens": _last(run, "tokens", ",.0f"),
        "time": f"{_date(times[0][1])} to {_date(times[-1][1])}" if times else "",
        "ended": _end(run),
        "training loss, last step line": _last(run, "loss", ".4f"),
        "best validation loss": f"{best[1]:.4f} at step {best[0]:,}" if best else "",
        "tokens per second, median": _median(run, "tokens_per_second", ",.0f"),
        "model FLOPs utilisation, median": _median(run, "mfu", ".1%"),
        "restarts after failures": f"{wall_time.restarts:,}" if run.events else "",
        "steps trained again": f"{wall_time.lost_steps:,}" if run.events else "",
        "diverged steps": f"{len(run.steps_of('divergence')):,}" if run.events else "",
    }


def _end(run: RunRecord) -> str:
    """How the newest attempt has ended."""
    ends = of_kind(last_start(run.events), *ENDS, "error")
    return ends[-1].text if ends else "not yet, or without a last word"


def _last(run: RunRecord, metric: str, form: str) -> str:
    points = run.series(metric)
    return format(points[-1][1], form) if points else ""


def _median(run: RunRecord, metric: str, form: str) -> str:
    points = run.series(metric)
    return format(median(value for _, value in points), form) if points else ""


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _wall_time(runs: Sequence[RunRecord]) -> Iterator[tuple[str, ...]]:
    """The share of each cause; that of the productive steps is the goodput."""
    seconds = [WallTime.of(run.events).seconds for run in runs]
    totals = [sum(each.values()) for each in seconds]
    for cause in (STEPS, *LOSSES):
        shares = (
            f"{each[cause] / total:.1%}" if total else "-"
            for each, total in zip(seconds, totals, strict=True)
        )
        yield ("steps: the goodput" if cause == STEPS else cause, *shares)


def _scores(results: Sequence[Result]) -> str:
    """A table of results, and their protocols."""
    columns = table_columns(results)
    header = ("model", "split", "mem_len", "tgt_len", "mode", "targets")
    rows = (
        (
            *(each.name, each.split, f"{each.mem_len:,}", f"{each.tgt_len:,}", each.mode),
            f"{each.tokens_scored:,}",
            *(SCORES[name].text(each.scores.get(name)) for name in columns),
        )
        for each in results
    )
    protocols = "\n".join(f"{each.name}: {each.protocol}" for each in results)
    return _table((*header, *(SCORES[name].label for name in columns)), rows) + _text(protocols)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; nothing without rows."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body, head = "".join(line("td", row) for row in rows), line("th", header)
    # With tabindex, keys can scroll it.
    return f'<div class="box" tabindex="0"><table>{head}{body}</table></div>' if body else ""


def _text(text: str) -> str:
    return f'<pre tabindex="0">{escape(text)}</pre>' if text else ""


# --- curves ---------------------------------------------------------------------------------------

CHART_INCHES = (3.7, 2.6)
"""Small, so that their text is as large as that of the page on a screen of 360 pixels. Wide screens
show several in a row."""
MAX_POINTS = 400
"""Longer series are drawn as means of this many parts."""
MAX_LABEL = 28
"""Characters of a run's name in a legend: its last ones."""
EVALUATED = ""
"""In CURVES: the loss of the split that a run evaluates."""
CURVES = {
    "Training loss in nats per token": "loss",
    "Validation loss in nats per token": EVALUATED,
    "Tokens per second": "tokens_per_second",
    "Learning rate": "lr",
    "Gradient norm before clipping": "gradient_norm",
    "Share of the memory that is filled": "memory_valid",
}
"""Metrics by title."""
LOGARITHMIC = ("gradient_norm",)


def charts_of_runs(runs: Sequence[RunRecord]) -> Iterator[tuple[str, bytes]]:
    """Title and SVG of the charts that the runs have values for."""
    for title, metric in CURVES.items():
        lines = {run.name: run.series(metric or run.evaluated) for run in runs}
        if any(lines.values()):
            yield title, _chart(runs, lines, is_logarithmic=metric in LOGARITHMIC)


def _chart(
    runs: Sequence[RunRecord], lines: Mapping[str, Series], *, is_logarithmic: bool
) -> bytes:
    """`lines`: by run."""
    figure = new_figure(CHART_INCHES)
    axes = figure.subplots()
    for number, run in enumerate(runs):
        x, y = thin_out(lines[run.name] if len(runs) == 1 else _by_tokens(run, lines[run.name]))
        draw_line(axes, x, y, label=run.name[-MAX_LABEL:], number=number, num_lines=len(runs))
    if is_logarithmic:
        axes.set_yscale("log", nonpositive="mask")
    if len(runs) == 1:
        _mark_events(axes, runs[0])
    finish(axes, "step" if len(runs) == 1 else "tokens", "")
    return svg_bytes(figure)


def _by_tokens(run: RunRecord, series: Series) -> Series:
    """The values with the tokens of their steps."""
    tokens = dict(run.series("tokens"))
    return [(int(tokens[step]), value) for step, value in series if step in tokens]


def thin_out(
    series: Series, max_points: int = MAX_POINTS
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Steps and values of at most `max_points` points, without NaN and Inf."""
    finite = [(step, value) for step, value in series if math.isfinite(value)]
    parts = np.array_split(np.array(finite, dtype=np.float64).reshape(-1, 2), max_points)
    means = [part.mean(axis=0) for part in parts if len(part)]
    steps, values = np.array(means).reshape(-1, 2).T
    return steps, values


def _mark_events(axes: Axes, run: RunRecord) -> None:
    """Restarts as triangles at the bottom, diverged steps as crosses at the top."""
    across = axes.get_xaxis_transform()  # y from 0 at the bottom to 1 at the top
    for steps, marker, height, name in (
        (run.steps_of("start")[1:], "^", 0.04, "restart"),
        (run.steps_of("divergence"), "X", 0.96, "diverged step"),
    ):
        if steps:
            axes.plot(
                steps, [height] * len(steps), marker, color="black", markersize=5,
                transform=across, label=f"{name} ({len(steps)})", clip_on=False,
            )  # fmt: skip


def _charts(charts: Iterable[tuple[str, bytes]]) -> str:
    """Charts in a grid of as many columns as fit."""
    figures = (
        f'<figure><figcaption>{title}</figcaption><img alt="{title}" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"></figure>'
        for title, svg in charts
    )
    return f'<div class="charts">{"".join(figures)}</div>'
