"""The HTML page of `txl report`: one file without scripts, fonts or images from elsewhere.

All text of the run is escaped: a log line or a config may contain anything.
"""

import base64
import time
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from txl_dist.reporting.run_charts import draw_charts
from txl_dist.reporting.run_record import RunRecord

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .15rem .8rem .15rem 0; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums }
pre { overflow-x: auto; background: #f4f4f4; padding: .6rem; font-size: 12px }
img { max-width: 100% } h2 { margin-top: 2rem; border-bottom: 1px solid #ccc }
"""


def run_page(run: RunRecord) -> str:
    """The whole page."""
    name = escape(run.path.resolve().name)
    sections = (
        _section("Summary", _table(_summary(run))),
        *(_section(title, _image(title, svg)) for title, svg in draw_charts(run)),
        _section("Evaluations in training", _evaluations(run)),
        _section(
            "Checkpoints", _table((f"step {step:,}", names) for step, names in run.checkpoints)
        ),
        _section("Events", _events(run)),
        _section("Config", f"<pre>{escape(run.config)}</pre>"),
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{name}</h1>\n{''.join(sections)}"
        "</body></html>\n"
    )


def _summary(run: RunRecord) -> Iterator[tuple[str, str]]:
    last = run.last
    yield "run directory", str(run.path)
    yield "steps", f"{last['step']:,.0f}"
    yield "tokens", f"{last.get('tokens', 0):,.0f}"
    if run.first_time:
        yield "first step", _date(run.first_time)
        yield "newest line", _date(last["time"])
    for name, label, form in (
        ("loss", "training loss, last step line", ".4f"),
        ("tokens_per_second", "tokens per second, last step line", ",.0f"),
        ("mfu", "model FLOPs utilisation, last step line", ".1%"),
    ):
        if name in last:
            yield label, format(last[name], form)
    if run.goodput is not None:  # not from the last step line, after which time has passed
        yield "goodput: productive seconds / wall seconds", f"{run.goodput.goodput:.1%}"
        yield "restarts after failures", f"{run.goodput.restarts:,}"
        yield "steps trained again after failures", f"{run.goodput.lost_steps:,}"
    if (metric := run.evaluated) is not None:
        step, best = min(run.series(metric), key=lambda point: point[1])
        yield f"best {metric}", f"{best:.4f} at step {step:,}"


def _evaluations(run: RunRecord) -> str:
    if run.evaluated is None:
        return "<p>None: the config has no split to evaluate, or the first evaluation is due.</p>"
    split = run.evaluated.removesuffix("/loss")
    columns = [
        name.removeprefix(f"{split}/") for name in run.metrics if name.startswith(f"{split}/")
    ]
    values = {column: dict(run.series(f"{split}/{column}")) for column in columns}
    rows = [
        (f"{step:,}", *(f"{values[column].get(step, float('nan')):,.6g}" for column in columns))
        for step in values["loss"]
    ]
    return f"<p>Split {escape(split)}</p>" + _table(rows, header=("step", *columns))


def _events(run: RunRecord) -> str:
    omitted = (
        f"<p>{run.num_omitted_events:,} older lines are in {escape(str(run.path))}/logs.</p>"
        if run.num_omitted_events
        else ""
    )
    return f"{omitted}<pre>{escape(chr(10).join(run.events))}</pre>"


def _table(rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = [f"<tr>{head}</tr>"] if head else []
    for first, *others in rows:
        cells = "".join(f'<td class="number">{escape(cell)}</td>' for cell in others)
        lines.append(f"<tr><td>{escape(first)}</td>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>" if lines else "<p>None.</p>"


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{content}\n"


def _image(title: str, svg: bytes) -> str:
    data = base64.b64encode(svg).decode()
    return f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{data}">'


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
