"""`txl report`: one HTML page about a run, or about several compared.

    metrics.jsonl   metrics, by name: (step, value) of every line that has it
    events.jsonl    starts, divergences, how it ended, seconds by cause (txl_dist/events.py)
    config.yaml     settings
    evaluations/    results of `txl eval` (evaluation/result.py)

Reads only, and imports no torch. What is damaged or missing is named on the page.

The curves of one run are drawn by step, with its restarts and the steps that have diverged. Those
of several runs are drawn over each other by tokens, because their steps may differ in size.

The page needs no other file and has no scripts. All text is escaped: that of a run may contain
anything. Tables and long lines scroll in their boxes, so that a screen of 360 pixels shows the page
without scrolling sideways.
"""

import base64
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from txl_dist.config.config_file import YamlTextError, flatten_settings, read_yaml
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.evaluation.result import EvaluationResult, kept_results, read_result, table_columns
from txl_dist.evaluation.scores import SCORES
from txl_dist.events import (
    ENDS,
    EVENTS,
    LOSSES,
    STEPS,
    Event,
    WallTime,
    last_start,
    newest_attempt,
    of_kind,
    read_events,
)
from txl_dist.tracking.journal import JOURNAL, read_metrics
from txl_dist.tracking.tracker import as_text

if TYPE_CHECKING:
    from txl_dist.analysis.plots import Axes

Series: TypeAlias = Sequence[tuple[int, float]]
"""(step, value), in the order of the steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    name: str
    """The path of the run directory, as it was given."""
    metrics: Mapping[str, Series]
    """By name; also `tokens`, the targets trained on, and `time`, seconds since the epoch."""
    events: Sequence[Event]
    settings: Mapping[str, Any]
    """By dotted name, not validated: another version may have others."""
    config: str
    """The text of config.yaml, which has no secrets."""
    results: Sequence[EvaluationResult]
    notes: Sequence[str]
    """What could not be read, and why."""

    @property
    def last_step(self) -> int:
        return max(points[-1][0] for points in self.metrics.values())

    @property
    def splits(self) -> list[str]:
        """Those that were evaluated during training; a resume may have changed the split."""
        return [name.removesuffix("/loss") for name in self.metrics if name.endswith("/loss")]


def read_run(run: Path) -> RunRecord:
    """Read a run directory. Raises ConfigError if it has no metrics."""
    metrics: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for line in read_metrics(run / JOURNAL):
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float):
                metrics[name].append((line["step"], value))
    if not metrics:
        raise ConfigError(
            f"{run} has no {JOURNAL} with a metric: it is not a run directory, or no step was "
            "trained yet. Give the `directory` of a config that `txl train` has run"
        )
    notes = []
    if not (events := read_events(run)):
        notes.append(f"{EVENTS} has no events: starts and goodput are not known; see {run}/logs")
    text, settings = "", None
    try:
        text = (run / "config.yaml").read_text(encoding="utf-8")
        settings = read_yaml(text).value
    except (OSError, UnicodeDecodeError, YamlTextError) as error:
        notes.append(f"config.yaml cannot be read, so settings are not known: {error}")
    results = []
    for path in kept_results(run):
        try:
            results.append(read_result(path))
        except (OSError, CheckpointError) as error:
            notes.append(str(error))
    return RunRecord(
        name=str(run),
        metrics=dict(metrics),
        events=events,
        settings=flatten_settings(settings) if isinstance(settings, dict) else {},
        config=text,
        results=sorted(results, key=lambda each: (each.name, each.split, each.mem_len)),
        notes=notes,
    )


# --- the page -------------------------------------------------------------------------------------

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
    yield "Runs", _table(("", *names), _side_by_side([_facts(run) for run in runs]))
    if len(runs) > 1:
        rows = _side_by_side([run.settings for run in runs])
        different = [row for row in rows if len(set(row[1:])) > 1 and row[0] != "directory"]
        yield "Settings that differ", _table(("setting", *names), different)
    yield "Curves", _charts(charts_of_runs(runs))
    wall_time = _side_by_side([_wall_time(run) for run in runs])
    yield "Wall time by cause", _table(("cause", *names), wall_time)
    results = {each.key: each for run in runs for each in run.results}
    yield "Scores by txl eval", _scores([*results.values()])
    for run in runs if len(runs) == 1 else ():
        yield "Events", _text("\n".join(f"{_date(each.time)}  {each.text}" for each in run.events))
        yield "Config", _text(run.config)


def _side_by_side(columns: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A row for each name: its value in every column, `-` where it is not known."""
    for name in dict.fromkeys(name for column in columns for name in column):
        yield name, *(as_text(column.get(name, "-")) for column in columns)


_NUMBERS = (
    ("tokens", "tokens", max, ",.0f"),
    ("training loss, last step line", "loss", itemgetter(-1), ".4f"),
    ("tokens per second, median", "tokens_per_second", median, ",.0f"),
    ("model FLOPs utilisation, median", "mfu", median, ".1%"),
)
"""Facts that are one number of a metric: title, metric, which number, format."""


def _facts(run: RunRecord) -> dict[str, str]:
    facts = {"steps": f"{run.last_step:,}"}
    if attempt := newest_attempt(run.events):
        facts |= {
            "steps": f"{run.last_step:,} of {attempt.num_steps:,}",
            "parameters": f"{attempt.num_parameters:,}",
            "weights at the start": attempt.origin or "random",
            "ranks": f"{attempt.num_ranks} on {attempt.device}",
            "computation": attempt.computation,
            "machine of rank 0": f"{attempt.host}: {attempt.machine}",
        }
    if times := run.metrics.get("time"):
        facts["time"] = f"{_date(times[0][1])} to {_date(times[-1][1])}"
    for title, metric, choose, form in _NUMBERS:
        if points := run.metrics.get(metric):
            facts[title] = format(choose([value for _, value in points]), form)
    for split in run.splits:
        points = run.metrics[f"{split}/loss"]
        if losses := {loss: step for step, loss in points if math.isfinite(loss)}:
            best = min(losses)
            facts[f"best loss of split {split}"] = f"{best:.4f} at step {losses[best]:,}"
    if run.events:
        wall_time, ends = WallTime.of(run.events), of_kind(last_start(run.events), *ENDS, "error")
        facts |= {
            "ended": ends[-1].text if ends else "not yet, or without a last word",
            "restarts after failures": f"{wall_time.restarts:,}",
            "steps trained again": f"{wall_time.lost_steps:,}",
            "diverged steps": f"{len(of_kind(run.events, 'divergence')):,}",
        }
    return facts


def _wall_time(run: RunRecord) -> dict[str, str]:
    """The share of each cause; that of the productive steps is the goodput."""
    seconds = WallTime.of(run.events).seconds
    total = sum(seconds.values())
    names = {STEPS: "steps: the goodput"}
    return {names.get(c, c): f"{seconds[c] / total:.1%}" for c in (STEPS, *LOSSES) if total}


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _scores(results: Sequence[EvaluationResult]) -> str:
    columns = table_columns(results)
    header = ["model", "split", "mem_len", "tgt_len", "mode", "targets"]
    header += [SCORES[name].label for name in columns]
    rows = (
        (
            *(each.name, each.split, f"{each.mem_len:,}", f"{each.tgt_len:,}", each.mode),
            f"{each.tokens_scored:,}",
            *(SCORES[name].text(each.scores.get(name)) for name in columns),
        )
        for each in results
    )
    protocols = "\n".join(f"{each.name}: {each.protocol}" for each in results)
    return _table(header, rows) + _text(protocols)


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
CURVES = {
    "Training loss in nats per token": "loss",
    "Loss of split {split} in nats per token": "{split}/loss",
    "Tokens per second": "tokens_per_second",
    "Learning rate": "lr",
    "Gradient norm before clipping": "gradient_norm",
    "Share of the memory that is filled": "memory_valid",
}
"""Metrics by title; those with `{split}` for every split."""


def charts_of_runs(runs: Sequence[RunRecord]) -> Iterator[tuple[str, bytes]]:
    """Title and SVG of the charts that the runs have values for."""
    splits = dict.fromkeys(split for run in runs for split in run.splits)
    for title, metric in CURVES.items():
        for split in splits if "{split}" in metric else [""]:
            lines = [run.metrics.get(metric.format(split=split), ()) for run in runs]
            if any(lines):
                chart = _chart(runs, lines, is_logarithmic=metric == "gradient_norm")
                yield title.format(split=split), chart


def _chart(runs: Sequence[RunRecord], lines: Sequence[Series], *, is_logarithmic: bool) -> bytes:
    # Here, so that a directory that is no run is refused before matplotlib is imported.
    from txl_dist.analysis.plots import draw_lines, finish, new_figure, svg_bytes

    figure = new_figure(CHART_INCHES)
    axes = figure.subplots()
    if len(runs) > 1:
        tokens_of = [dict(run.metrics.get("tokens", ())) for run in runs]
        lines = [
            [(int(tokens[step]), value) for step, value in line if step in tokens]
            for tokens, line in zip(tokens_of, lines, strict=True)
        ]
    # Of a long path its end, which names the run.
    draw_lines(axes, [(r.name[-28:], *thin_out(line)) for r, line in zip(runs, lines, strict=True)])
    if is_logarithmic:
        axes.set_yscale("log", nonpositive="mask")
    if len(runs) == 1:
        _mark_events(axes, runs[0])
    finish(axes, "step" if len(runs) == 1 else "tokens", "")
    return svg_bytes(figure)


def thin_out(
    series: Series, max_points: int = MAX_POINTS
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Steps and values of at most `max_points` points, without NaN and Inf."""
    finite = [(step, value) for step, value in series if math.isfinite(value)]
    parts = np.array_split(np.array(finite, dtype=np.float64).reshape(-1, 2), max_points)
    means = [part.mean(axis=0) for part in parts if len(part)]
    steps, values = np.array(means).reshape(-1, 2).T
    return steps, values


def _mark_events(axes: "Axes", run: RunRecord) -> None:
    """Restarts as triangles at the bottom, diverged steps as crosses at the top."""
    for events, marker, height, name in (
        (of_kind(run.events, "start")[1:], "^", 0.04, "restart"),
        (of_kind(run.events, "divergence"), "X", 0.96, "diverged step"),
    ):
        if events:
            axes.plot(
                [event.step or 0 for event in events], [height] * len(events), marker,
                color="black", markersize=5, label=f"{name} ({len(events)})", clip_on=False,
                transform=axes.get_xaxis_transform(),  # y from 0 at the bottom to 1 at the top
            )  # fmt: skip


def _charts(charts: Iterable[tuple[str, bytes]]) -> str:
    figures = (
        f'<figure><figcaption>{title}</figcaption><img alt="{title}" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"></figure>'
        for title, svg in ((escape(text), svg) for text, svg in charts)
    )
    return f'<div class="charts">{"".join(figures)}</div>'
