"""`txl report`: what a run directory says about a run, as one HTML page.

metrics.jsonl   -> metrics, by name: (step, value) of every line that has it
logs/rank-0.log -> events: the lines that are no step lines
goodput.json    -> seconds by cause
config.yaml, checkpoints/

Reads only; damage is a note. The page has no scripts, fonts or images from elsewhere, and all text
of the run is escaped: a log line or a config may contain anything.
"""

import base64
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TypeAlias

from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.errors import CheckpointError
from txl_dist.tracking.journal import JOURNAL, read_metrics
from txl_dist.training.goodput import GoodputFile, read_goodput

Series: TypeAlias = Sequence[tuple[int, float]]
"""(step, value), in the order of the steps."""

_STEP_LINE = re.compile(r"\d\d:\d\d:\d\d step \d+ \|")
MAX_EVENTS = 500
"""The newest lines of the log that a report shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """Everything that a report shows."""

    path: Path
    metrics: dict[str, Series]
    last: dict[str, float]
    """The newest value of every metric, and `step`, `tokens` and `time`."""
    first_time: float
    goodput: GoodputFile | None
    events: list[str]
    num_omitted_events: int
    checkpoints: list[tuple[int, str]]
    """(step, which of LATEST and BEST point to it)."""
    config: str
    """The text of config.yaml, which has no secrets."""

    def series(self, name: str) -> Series:
        """The values of a metric; empty if the run does not have it."""
        return self.metrics.get(name, ())

    @property
    def evaluated(self) -> str | None:
        """The metric of the split that is evaluated during training, such as `valid/loss`."""
        return next((name for name in self.metrics if name.endswith("/loss")), None)


def read_run(run: Path) -> RunRecord:
    """Read a run directory. Raises CheckpointError if it has no metrics."""
    journal = run / JOURNAL
    if not journal.is_file():
        raise CheckpointError(
            f"{run} has no {JOURNAL}: it is not a run directory, or no step was trained yet. Give "
            "the `directory` of a config that `txl train` has run"
        )
    metrics: dict[str, list[tuple[int, float]]] = defaultdict(list)
    last: dict[str, float] = {}
    first_time = 0.0
    for line in read_metrics(journal):
        numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
        first_time = first_time or numbers.get("time", 0.0)
        last |= numbers
        for name, value in numbers.items():
            if name not in ("step", "tokens", "time"):
                metrics[name].append((line["step"], value))
    if not last:
        raise CheckpointError(f"{journal} has no complete line; run the report again after a step")
    events = _events(run / "logs" / "rank-0.log")
    return RunRecord(
        path=run,
        metrics=dict(metrics),
        last=last,
        first_time=first_time,
        goodput=read_goodput(run / "goodput.json"),
        events=events[-MAX_EVENTS:],
        num_omitted_events=max(0, len(events) - MAX_EVENTS),
        checkpoints=_checkpoints(run),
        config=_text(run / "config.yaml"),
    )


def _events(log: Path) -> list[str]:
    return [line for line in _text(log).splitlines() if line and not _STEP_LINE.match(line)]


def _checkpoints(run: Path) -> list[tuple[int, str]]:
    directory = CheckpointDirectory(run)
    pointers = {name: directory.pointer(name) for name in ("LATEST", "BEST")}
    return [
        (step, ", ".join(name for name, target in pointers.items() if target == step))
        for step in directory.steps()
    ]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"({path.name} cannot be read: {error.strerror})"


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .15rem .8rem .15rem 0; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums }
pre { overflow-x: auto; background: #f4f4f4; padding: .6rem; font-size: 12px }
img { max-width: 100% } h2 { margin-top: 2rem; border-bottom: 1px solid #ccc }
"""


def run_page(run: RunRecord) -> str:
    """The whole page."""
    from txl_dist.analysis.plots import draw_charts  # matplotlib takes a second to import

    name = escape(run.path.resolve().name)
    sections = (
        _section("Summary", _table(_summary(run))),
        *(_section(title, _image(title, svg)) for title, svg in draw_charts(run)),
        _section("Evaluations in training", _evaluations(run)),
        _section(
            "Checkpoints", _table((f"step {step:,}", names) for step, names in run.checkpoints)
        ),
        _section("Events", _event_lines(run)),
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


def _event_lines(run: RunRecord) -> str:
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
