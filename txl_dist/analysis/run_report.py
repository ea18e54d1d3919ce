"""`txl report`: one HTML page about a run, or about several compared.

    RunRecord (run_record.py) -> charts (run_charts.py) -> page (page.py)

With several runs, every section has one column or one line per run, and the settings are those that
differ. What was not measured is named with the command that measures it.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from txl_dist.analysis.page import (
    charts,
    details,
    facts,
    html_page,
    paragraph,
    preformatted,
    section,
    table,
)
from txl_dist.analysis.run_charts import charts_of_runs, memory_charts
from txl_dist.analysis.run_record import RunRecord, differing_settings, with_distinct_names
from txl_dist.analysis.run_results import Attention, Evaluation, Recl, curves_by_mem_len

MAX_EVENTS = 500
"""The newest lines of the log that a report shows."""
MAX_STEPS = 60
"""The newest evaluations during training that a report shows."""


def run_page(runs: Sequence[RunRecord]) -> str:
    """The whole page. `runs` has at least one run."""
    runs = with_distinct_names(runs)
    if len(runs) == 1:
        return html_page(runs[0].name, "txl report", _sections_of_one(runs[0]))
    title = f"{len(runs)} runs compared"
    return html_page(title, ", ".join(run.name for run in runs), _sections_of_several(runs))


def _sections_of_one(run: RunRecord) -> Iterator[str]:
    yield _notes([run])
    yield facts(_facts(run))
    if run.sample:
        split = (run.evaluated or "valid").removesuffix("/loss")
        yield section(f"Held-out text: {split}", preformatted(run.sample, "text"))
    yield section("Curves", _legend([run]), charts(charts_of_runs([run])))
    yield section("Evaluations during training", _scores_by_step(run))
    yield from _results([run])
    yield section("Starts", _starts(run))
    yield section("Events", _events(run))
    checkpoints = [(f"{step:,}", names) for step, names in run.checkpoints]
    yield section("Checkpoints", table(("step", "pointers"), checkpoints))
    yield section("Config", details("config.yaml, every setting", preformatted(run.config)))


def _sections_of_several(runs: Sequence[RunRecord]) -> Iterator[str]:
    yield _notes(runs)
    names = [run.name for run in runs]
    by_run = [dict(_facts(run)) for run in runs]
    labels = [label for label in by_run[0] if any(each.get(label) for each in by_run)]
    rows = [(label, *(each.get(label, "") or "-" for each in by_run)) for label in labels]
    yield section("Runs", table(("", *names), rows))
    yield section(
        "Settings that differ",
        table(("setting", *names), differing_settings(runs)) or paragraph("None."),
    )
    yield section("Curves", _legend(runs), charts(charts_of_runs(runs)))
    yield from _results(runs)


def _notes(runs: Sequence[RunRecord]) -> str:
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    return section("Not shown", *(paragraph(note, "note") for note in notes))


# --- facts ----------------------------------------------------------------------------------------


def _facts(run: RunRecord) -> Iterator[tuple[str, str]]:
    """The same labels for every run."""
    last, goodput, best = run.last, run.goodput, run.best
    yield "run directory", str(run.path)
    yield "parameters", f"{run.num_parameters:,}" if run.num_parameters else ""
    yield "memory", _memory(run)
    yield "data", "; ".join(f"{path} ({text})" for path, text in run.data)
    yield "hardware", "; ".join(part for part in (run.log.machine, run.log.ranks) if part)
    yield "software", run.manifest.written_by if run.manifest else ""
    steps = run.settings.get("training.num_steps")
    yield "steps", f"{last['step']:,.0f}" + (f" of {steps:,}" if isinstance(steps, int) else "")
    yield "tokens", f"{last.get('tokens', 0):,.0f}"
    yield "time", f"{_date(run.first_time)} to {_date(last['time'])}" if run.first_time else ""
    yield "ended", run.log.last_word or "not yet, or without a last word"
    yield "training loss, last step line", _number(last.get("loss"), ".4f")
    yield "best validation loss", f"{best[1]:.4f} at step {best[0]:,}" if best else ""
    yield "tokens per second, median", _median(run, "tokens_per_second", ",.0f")
    yield "model FLOPs utilisation, median", _median(run, "mfu", ".1%")
    if goodput is not None:  # not from the last step line, after which time has passed
        yield "goodput: productive / wall seconds", f"{goodput.goodput:.1%}"
        yield "restarts after failures", f"{goodput.restarts:,}"
        yield "steps trained again after failures", f"{goodput.lost_steps:,}"
    yield "diverged steps", f"{len(run.log.divergences):,}"


def _memory(run: RunRecord) -> str:
    """`recurrent, 128 tokens per layer`."""
    settings = run.settings
    if "model.mem_len" not in settings:
        return ""
    kind, length = settings.get("model.memory", "recurrent"), settings["model.mem_len"]
    parts = [f"{kind}, {length:,} tokens per layer" if length else f"{kind}, none (mem_len 0)"]
    for name, kinds in (
        ("compressed_len", ("compressive",)),
        ("compression_rate", ("compressive",)),
        ("memory_tokens", ("tokens", "recurrent+tokens", "associative")),
        ("d_memory_key", ("associative",)),
    ):
        if kind in kinds and settings.get(f"model.{name}") is not None:
            parts.append(f"{name} {settings[f'model.{name}']}")
    if settings.get("model.mem_shares", "[]") != "[]":
        parts.append(f"mem_shares {settings['model.mem_shares']}")
    return ", ".join(parts)


def _median(run: RunRecord, metric: str, form: str) -> str:
    values = [value for _, value in run.series(metric)]
    return format(median(values), form) if values else ""


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


# --- the course of a run --------------------------------------------------------------------------


def _legend(runs: Sequence[RunRecord]) -> str:
    marks = []
    if any(run.log.starts[1:] for run in runs):
        marks.append("triangles: the ranks were started again, at this step")
    if any(run.log.divergences for run in runs):
        marks.append("bold crosses at the top: this step has diverged")
    if any(run.given_up for run in runs):
        marks.append("thin crosses: losses of steps that a restart or a rollback has given up")
    return paragraph(f"Marks on the losses: {'; '.join(marks)}.", "soft") if marks else ""


def _scores_by_step(run: RunRecord) -> str:
    if run.evaluated is None:
        return paragraph("None: the config has no split to evaluate, or the first one is due.")
    split = run.evaluated.removesuffix("/loss")
    columns = [
        name.removeprefix(f"{split}/") for name in run.metrics if name.startswith(f"{split}/")
    ]
    values = {column: dict(run.series(f"{split}/{column}")) for column in columns}
    rows = [
        (f"{step:,}", *(_number(values[column].get(step), ",.6g") or "-" for column in columns))
        for step in list(values["loss"])[-MAX_STEPS:]
    ]
    return paragraph(f"Split {split}", "soft") + table(("step", *columns), rows)


def _starts(run: RunRecord) -> str:
    rows = [
        (str(number), start.time, f"{start.step:,}", start.after)
        for number, start in enumerate(run.log.starts, start=1)
    ]
    returns = [
        paragraph(f"Rollback from step {reached:,} to the checkpoint of step {step:,}.")
        for reached, step in run.log.rollbacks
    ]
    head = ("start", "time of day", "from step", "the start before it ended with")
    return table(head, rows) + "".join(returns)


def _events(run: RunRecord) -> str:
    num_omitted = max(0, len(run.log.events) - MAX_EVENTS)
    text = f"{num_omitted:,} older lines are in {run.path}/logs." if num_omitted else ""
    lines = preformatted("\n".join(run.log.events[-MAX_EVENTS:]))
    return (paragraph(text, "soft") if text else "") + lines


# --- results of other commands --------------------------------------------------------------------


def _results(runs: Sequence[RunRecord]) -> Iterator[str]:
    evaluations = _distinct(each for run in runs for each in run.results.evaluations)
    recl = _distinct(each for run in runs for each in run.results.recl)
    attention = _distinct(each for run in runs for each in run.results.attention)
    yield section("Evaluations by txl eval", _evaluations(evaluations))
    drawn = charts(memory_charts(evaluations, recl, attention))
    parts = (drawn, *map(_recl, recl), *_unmeasured(runs[0], evaluations, recl, attention))
    yield section("What the memory is worth", *parts)


def _distinct(results: Iterable[object]) -> list:  # type: ignore[type-arg]
    """Without repetitions: several runs may have been given the same directory of results."""
    return list({str(each): each for each in results}.values())


def _evaluations(evaluations: Sequence[Evaluation]) -> str:
    header = ("model", "split", "mem_len", "tgt_len", "mode", "targets", "nats/token",
              "perplexity", "bits/byte", "word perplexity")  # fmt: skip
    rows = [
        (
            each.name, each.split, f"{each.mem_len:,}", f"{each.tgt_len:,}", each.mode,
            f"{each.tokens_scored:,}", f"{each.nats_per_token:.4f}",
            _number(each.perplexity, ".4g") or "-", _number(each.bits_per_byte, ".4f") or "-",
            _number(each.word_perplexity, ".4g") or "-",
        )
        for each in evaluations
    ]  # fmt: skip
    protocols = "\n\n".join(f"{each.name}: {each.protocol}" for each in evaluations)
    return table(header, rows) + details("protocols, to quote", preformatted(protocols, "text"))


def _recl(report: Recl) -> str:
    """RECL by model and fraction of the hardest targets."""
    fractions = [each.r for each in report.models[0].recl] if report.models else []
    if not fractions:
        return ""
    rows = [
        (
            model.name,
            *(
                f"{'≥ ' if each.is_lower_bound else ''}{each.recl:,} ({each.low:,} to {each.high:,})"
                for each in model.recl
            ),
        )
        for model in report.models
    ]
    text = (
        f"RECL of the group {report.group} on {report.split}, in tokens, with 95 % intervals: "
        f"{report.positions:,} targets, of which the fraction r that is hardest."
    )
    header = ("model", *(f"r = {fraction:g}" for fraction in fractions))
    return paragraph(text, "soft") + table(header, rows)


def _unmeasured(
    run: RunRecord,
    evaluations: Sequence[Evaluation],
    recl: Sequence[Recl],
    attention: Sequence[Attention],
) -> Iterator[str]:
    """What is missing, with the commands."""
    data = run.data[0][0] if run.data else "DATA"
    length = run.settings.get("model.mem_len") or 64
    commands = []
    if not curves_by_mem_len(evaluations):
        commands.append(f"txl eval {run.path} {data} --sweep mem_len=0,{length}")
    if not any(each.details for each in evaluations):
        commands.append(f"txl eval {run.path} {data} --details")
    if not recl:
        commands.append(f"txl recl {run.path} OTHER-RUN {data} --out {run.path}/recl")
    if not attention:
        commands.append(f"txl attention {run.path} {data} --out {run.path}/attention")
    if commands:
        yield paragraph("Not measured yet. These commands measure it, and the next report has it:")
        yield preformatted("\n".join(commands))
