"""`txl report`: one HTML page about a run, or about several compared.

    RunRecord (run_record.py) -> charts (run_charts.py) -> page (page.py)

With several runs, every section has one column or one line per run, and the settings are those that
differ.
"""

import time
from collections.abc import Iterator, Sequence
from statistics import median

from txl_dist.analysis.page import (
    charts,
    details,
    html_page,
    paragraph,
    preformatted,
    section,
    table,
)
from txl_dist.analysis.run_charts import charts_of_runs, memory_chart
from txl_dist.analysis.run_record import RunRecord, differing_settings, with_distinct_names
from txl_dist.config.data_config import dataset_paths
from txl_dist.evaluation.result import Result, table_columns
from txl_dist.evaluation.scores import SCORES, label_of
from txl_dist.events import ENDS, last_start, of_kind
from txl_dist.training.goodput import LOSSES, STEPS

MAX_EVENTS = 500
"""The newest events that a report shows."""
MAX_STEPS = 60
"""The newest evaluations during training that a report shows."""


def run_page(runs: Sequence[RunRecord]) -> str:
    """The whole page. `runs` has at least one run."""
    if len(runs) > 1:
        runs = with_distinct_names(runs)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    return html_page(title, _sections(runs))


def _sections(runs: Sequence[RunRecord]) -> Iterator[str]:
    names = [run.name for run in runs]
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    yield section("Not shown", *(paragraph(note, "note") for note in notes))
    facts = [dict(_facts(run)) for run in runs]
    rows = [(name, *(each[name] or "-" for each in facts)) for name in facts[0]]
    yield section("Runs", table(("", *names), rows))
    if len(runs) > 1:
        differing = table(("setting", *names), differing_settings(runs)) or paragraph("None.")
        yield section("Settings that differ", differing)
    yield section("Curves", charts(charts_of_runs(runs)))
    yield section("Wall time by cause", _wall_time(runs))
    results = list({each.key: each for run in runs for each in run.results}.values())
    drawn = charts(memory_chart(results))
    yield section("Scores by txl eval", table_of_results(results), drawn)
    for run in runs if len(runs) == 1 else ():
        yield section("Evaluations during training", _scores_by_step(run))
        yield section("Events", _events(run))
        yield section("Config", details("config.yaml, every setting", preformatted(run.config)))


def _facts(run: RunRecord) -> Iterator[tuple[str, str]]:
    """The same names for every run."""
    last, settings, attempt, wall_time = run.last, run.settings, run.attempt, run.wall_time
    yield "run directory", str(run.path)
    yield "parameters", f"{attempt.num_parameters:,}" if attempt else ""
    memory = (settings.get("model.memory"), f"mem_len {settings.get('model.mem_len')}")
    yield "memory", ", ".join(map(str, memory)) if "model.mem_len" in settings else ""
    yield "data", ", ".join(dataset_paths(settings).values())
    ranks = f"{attempt.num_ranks} on {attempt.device}" if attempt else ""
    yield "ranks", f"{ranks} | {attempt.computation}" if attempt else ""
    yield "machine of rank 0", f"{attempt.host}: {attempt.machine}" if attempt else ""
    steps = settings.get("training.num_steps")
    yield "steps", f"{last['step']:,.0f}" + (f" of {steps:,}" if isinstance(steps, int) else "")
    yield "tokens", f"{last.get('tokens', 0):,.0f}"
    yield "time", f"{_date(run.first_time)} to {_date(last['time'])}" if run.first_time else ""
    yield "ended", _end(run)
    yield "training loss, last step line", f"{last['loss']:.4f}" if "loss" in last else ""
    best = run.best
    yield "best validation loss", f"{best[1]:.4f} at step {best[0]:,}" if best else ""
    yield "tokens per second, median", _median(run, "tokens_per_second", ",.0f")
    yield "model FLOPs utilisation, median", _median(run, "mfu", ".1%")
    goodput = wall_time.goodput
    yield "goodput: productive / wall seconds", "" if goodput is None else f"{goodput:.1%}"
    yield "restarts after failures", f"{wall_time.restarts:,}" if run.events else ""
    yield "steps trained again", f"{wall_time.lost_steps:,}" if run.events else ""
    yield "diverged steps", f"{len(run.steps_of('divergence')):,}" if run.events else ""


def _end(run: RunRecord) -> str:
    """How the newest attempt has ended."""
    ends = of_kind(last_start(run.events), *ENDS, "error")
    return ends[-1].text if ends else "not yet, or without a last word"


def _median(run: RunRecord, metric: str, form: str) -> str:
    values = [value for _, value in run.series(metric)]
    return format(median(values), form) if values else ""


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _wall_time(runs: Sequence[RunRecord]) -> str:
    """The share of each cause."""
    seconds = [run.wall_time.seconds for run in runs]
    totals = [sum(each.values()) for each in seconds]
    rows = [
        (
            cause,
            *(
                f"{each[cause] / total:.1%}" if total else "-"
                for each, total in zip(seconds, totals, strict=True)
            ),
        )
        for cause in (STEPS, *LOSSES)
        if any(each[cause] for each in seconds)
    ]
    return table(("cause", *(run.name for run in runs)), rows)


def _scores_by_step(run: RunRecord) -> str:
    if run.evaluated is None:
        return paragraph("None: the config has no split to evaluate, or the first one is due.")
    split = run.evaluated.removesuffix("loss")
    metrics = [name for name in run.metrics if name.startswith(split)]
    values = [dict(run.series(name)) for name in metrics]
    rows = [
        (f"{step:,}", *(f"{each[step]:,.6g}" if step in each else "-" for each in values))
        for step, _ in list(run.series(run.evaluated))[-MAX_STEPS:]
    ]
    labels = (label_of(name.removeprefix(split)) for name in metrics)
    return paragraph(f"Split {split.rstrip('/')}", "soft") + table(("step", *labels), rows)


def _events(run: RunRecord) -> str:
    num_omitted = max(0, len(run.events) - MAX_EVENTS)
    omitted = paragraph(f"{num_omitted:,} older events are left out.", "soft")
    lines = preformatted("\n".join(f"{_date(e.time)}  {e.text}" for e in run.events[-MAX_EVENTS:]))
    return omitted * bool(num_omitted) + lines


def table_of_results(results: Sequence[Result]) -> str:
    """All results, and their protocols."""
    columns = table_columns(results)
    labels = (SCORES[name].label for name in columns)
    rows = [
        (
            *(each.name, each.split, f"{each.mem_len:,}", f"{each.tgt_len:,}", each.mode),
            f"{each.tokens_scored:,}",
            *(SCORES[name].text(each.scores.get(name)) for name in columns),
        )
        for each in results
    ]
    protocols = "\n\n".join(f"{each.name}: {each.protocol}" for each in results)
    return table(
        ("model", "split", "mem_len", "tgt_len", "mode", "targets", *labels), rows
    ) + details("protocols, to quote", preformatted(protocols, "text"))
