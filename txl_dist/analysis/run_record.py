"""RunRecord: what a run directory says about a run, for `txl report`.

    metrics.jsonl   metrics, by name: (step, value) of every line that has it
    events.jsonl    starts, divergences, how it ended, seconds by cause (txl_dist/events.py)
    config.yaml     settings
    evaluations/    results of `txl eval` (evaluation/result.py)

Reads only, and imports no torch. What is damaged or missing becomes a note.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from data_pipeline.system.strict import first_problem
from txl_dist.config.config_file import YamlTextError, flatten_settings, read_yaml
from txl_dist.errors import ConfigError
from txl_dist.evaluation.result import Result
from txl_dist.evaluation.scores import kept_results
from txl_dist.events import EVENTS, Event, Kind, read_events
from txl_dist.tracking.journal import JOURNAL, read_metrics
from txl_dist.tracking.tracker import as_text

Series: TypeAlias = Sequence[tuple[int, float]]
"""(step, value), in the order of the steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """Everything that a report shows."""

    name: str
    """The path of the run directory, as it was given."""
    metrics: Mapping[str, Series]
    """By name; also `tokens`, the targets trained on, and `time`, seconds since the epoch."""
    events: Sequence[Event]
    settings: Mapping[str, Any]
    """By dotted name."""
    config: str
    """The text of config.yaml, which has no secrets."""
    results: Sequence[Result]
    notes: Sequence[str]
    """What could not be read, and why."""

    def series(self, name: str) -> Series:
        """The values of a metric; empty if the run does not have it."""
        return self.metrics.get(name, ())

    def steps_of(self, kind: Kind) -> list[int]:
        """The steps of the events of one kind."""
        return [event.step or 0 for event in self.events if event.kind == kind]

    @property
    def last_step(self) -> int:
        """The newest step of any metric."""
        return max(points[-1][0] for points in self.metrics.values())

    @property
    def evaluated(self) -> str:
        """The loss of the split that is evaluated during training, such as `valid/loss`, or ""."""
        return next((name for name in self.metrics if name.endswith("/loss")), "")

    @property
    def best(self) -> tuple[int, float] | None:
        """(step, loss) of the best evaluation during training."""
        points = [point for point in self.series(self.evaluated) if math.isfinite(point[1])]
        return min(points, key=lambda point: point[1], default=None)


def read_run(run: Path) -> RunRecord:
    """Read a run directory. Raises ConfigError if it has no metrics."""
    metrics = _read_metrics(run / JOURNAL) if (run / JOURNAL).is_file() else {}
    if not metrics:
        raise ConfigError(
            f"{run} has no {JOURNAL} with a metric: it is not a run directory, or no step was "
            "trained yet. Give the `directory` of a config that `txl train` has run"
        )
    notes: list[str] = []
    events = read_events(run)
    if not events:
        notes.append(f"{EVENTS} has no events: starts and goodput are not known; see {run}/logs")
    config, settings = _read_config(run / "config.yaml", notes)
    return RunRecord(
        name=str(run),
        metrics=metrics,
        events=events,
        settings=settings,
        config=config,
        results=_read_results(run, notes),
        notes=notes,
    )


def _read_metrics(path: Path) -> Mapping[str, Series]:
    metrics: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for line in read_metrics(path):
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float):
                metrics[name].append((line["step"], value))
    return dict(metrics)


def _read_config(path: Path, notes: list[str]) -> tuple[str, Mapping[str, Any]]:
    """The text, and the settings, which are not validated: another version may have others."""
    try:
        text = path.read_text(encoding="utf-8")
        value = read_yaml(text).value
    except (OSError, UnicodeDecodeError, YamlTextError) as error:
        notes.append(f"config.yaml cannot be read, so settings are not known: {error}")
        return "", {}
    return text, flatten_settings(value) if isinstance(value, dict) else {}


def _read_results(run: Path, notes: list[str]) -> list[Result]:
    """What `txl eval` has kept, sorted by model, split and length of the memory."""
    results = []
    for path in kept_results(run):
        try:
            results.append(Result.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError) as error:
            problem = first_problem(error) if isinstance(error, ValidationError) else error
            notes.append(f"{path} is not shown: {problem}")
    return sorted(results, key=lambda each: (each.name, each.split, each.mem_len))


def differing_settings(runs: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """(name, value in each run) of every setting that is not the same in all runs."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name != "directory")
    rows = [(name, *(as_text(run.settings.get(name, "")) for run in runs)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]
