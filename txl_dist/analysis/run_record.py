"""RunRecord: what a run directory says about a run, for `txl report`.

    metrics.jsonl   metrics, by name: (step, value) of every line that has it
    events.jsonl    starts, divergences, how it ended, seconds by cause (txl_dist/events.py)
    config.yaml     settings
    evaluations/    results of `txl eval` (evaluation/result.py)

Reads only, and imports no torch. What is damaged or missing becomes a note.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from data_pipeline.system.strict import first_problem
from txl_dist.config.config_file import flatten_settings
from txl_dist.config.yaml_file import YamlTextError, read_yaml
from txl_dist.errors import ConfigError
from txl_dist.evaluation.result import Result
from txl_dist.evaluation.scores import kept_results
from txl_dist.events import EVENTS, AttemptStart, Event, Kind, read_events
from txl_dist.tracking.journal import JOURNAL, SUPERSEDED, read_metrics
from txl_dist.tracking.tracker import as_text
from txl_dist.training.goodput import WallTime

Series: TypeAlias = Sequence[tuple[int, float]]
"""(step, value), in the order of the steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """Everything that a report shows."""

    path: Path
    name: str
    metrics: dict[str, Series]
    superseded: Series
    """The training loss of steps that a resume or a rollback has superseded."""
    tokens: dict[int, int]
    """Targets trained on, by step."""
    last: dict[str, float]
    """The newest value of every metric, and `step`, `tokens` and `time`."""
    first_time: float
    events: list[Event]
    settings: Mapping[str, Any]
    """By dotted name."""
    config: str
    """The text of config.yaml, which has no secrets."""
    results: list[Result]
    notes: list[str] = field(default_factory=list)
    """What could not be read, and why."""

    def series(self, name: str) -> Series:
        """The values of a metric; empty if the run does not have it."""
        return self.metrics.get(name, ())

    def steps_of(self, kind: Kind) -> list[int]:
        """The steps of the events of one kind."""
        return [event.step or 0 for event in self.events if event.kind == kind]

    @property
    def attempt(self) -> AttemptStart | None:
        """The newest one."""
        return next((event.start for event in reversed(self.events) if event.start), None)

    @property
    def wall_time(self) -> WallTime:
        return WallTime.of(self.events)

    @property
    def evaluated(self) -> str | None:
        """The metric of the split that is evaluated during training, such as `valid/loss`."""
        return next((name for name in self.metrics if name.endswith("/loss")), None)

    @property
    def best(self) -> tuple[int, float] | None:
        """(step, loss) of the best evaluation during training."""
        points = [p for p in self.series(self.evaluated or "") if math.isfinite(p[1])]
        return min(points, key=lambda point: point[1], default=None)


def read_run(run: Path) -> RunRecord:
    """Read a run directory. Raises ConfigError if it has no metrics."""
    journal = run / JOURNAL
    if not journal.is_file():
        raise ConfigError(
            f"{run} has no {JOURNAL}: it is not a run directory, or no step was trained yet. Give "
            "the `directory` of a config that `txl train` has run"
        )
    notes: list[str] = []
    metrics, last = _series(journal)
    if not last:
        raise ConfigError(f"{journal} has no complete line; run the report again after a step")
    superseded = _series(run / SUPERSEDED)[0] if (run / SUPERSEDED).is_file() else {}
    times = metrics.pop("time", [(0, 0.0)])
    config, settings = _read_config(run, notes)
    return RunRecord(
        path=run,
        name=run.resolve().name,
        tokens={step: int(tokens) for step, tokens in metrics.pop("tokens", ())},
        metrics={**metrics},
        superseded=superseded.get("loss", ()),
        last=last,
        first_time=times[0][1],
        events=_read_events(run, notes),
        settings=settings,
        config=config,
        results=_read_results(run, notes),
        notes=notes,
    )


def _series(path: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, float]]:
    """All values of each metric, and the newest one."""
    metrics: dict[str, list[tuple[int, float]]] = defaultdict(list)
    last: dict[str, float] = {}
    for line in read_metrics(path):
        numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
        last |= numbers
        step = numbers.pop("step")
        for name, value in numbers.items():
            metrics[name].append((int(step), value))
    return metrics, last


def _read_events(run: Path, notes: list[str]) -> list[Event]:
    events: list[Event] = []
    try:
        events = read_events(run)
    except OSError as error:
        notes.append(f"{EVENTS} cannot be read: {error.strerror}")
    if not events:
        notes.append(f"{EVENTS} has no events: starts and goodput are not known; see {run}/logs")
    return events


def _read_config(run: Path, notes: list[str]) -> tuple[str, Mapping[str, Any]]:
    # Not validated: a run of another version may have other settings.
    with suppress(OSError, UnicodeDecodeError):
        text = (run / "config.yaml").read_text(encoding="utf-8")
        try:
            value = read_yaml(text).value
            return text, flatten_settings(value) if isinstance(value, dict) else {}
        except YamlTextError as error:
            notes.append(f"config.yaml{error.place}: {error}")
            return text, {}
    notes.append("config.yaml cannot be read: settings are not known")
    return "", {}


def _read_results(run: Path, notes: list[str]) -> list[Result]:
    """What `txl eval` has kept, each evaluation once, one with details first."""
    results = []
    for path in kept_results(run):
        try:
            results.append(Result.model_validate(json.loads(path.read_bytes())))
        except (OSError, ValueError, RecursionError) as error:
            problem = first_problem(error) if isinstance(error, ValidationError) else error
            notes.append(f"{path} is not shown: {problem}")
    results.sort(key=lambda each: (each.name, each.split, each.mem_len, not each.details))
    by_key: dict[tuple[Any, ...], Result] = {}
    for each in results:
        by_key.setdefault(each.key, each)
    return list(by_key.values())


def with_distinct_names(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The names of several runs: their paths below the directory that they have in common."""
    common = os.path.commonpath([run.path.resolve().parent for run in runs])
    return [replace(run, name=os.path.relpath(run.path.resolve(), common)) for run in runs]


def differing_settings(runs: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """(name, value in each run) of every setting that is not the same in all runs."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name != "directory")
    rows = [(name, *(as_text(run.settings.get(name, "")) for run in runs)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]
